// What the pages' modules hand to each other. `document()` in headwise/report/schema.py writes looks, page/timeline.py runs.

/** An array, packed (headwise/report/codec.py). */
interface Grid {
  shape: number[];
  planes: number;
  data: string;
  levels?: number;
  root?: boolean;
  scale?: number[];
  unit?: number;
  unpacked?: Promise<{ shape: number[]; values: Float32Array }>;
}

interface Column { key: string; title: string; short: string; unit: string; formula: string; meaning: string; digits?: number }
interface Label { label: string; key: string; score: number; sign?: "≥" | "≤"; threshold: number; coverage?: number }
interface Rule {
  label: string; brief: string; key: string; sign: string; threshold: number; why: string; source?: string;
  given?: [key: string, sign: string, threshold: number] | null;
}
interface Stream {
  name: string; tokens: string[]; special: number[]; grid: [rows: number, columns: number] | null; picture: string | null;
  pieces: string[] | null;
  apart?: boolean;      // of random tokens, which are no text
  positions?: boolean;  // of places that a layer numbers anew
}

/** How tokens lie in the cells of a map. */
interface Axis {
  count: number; cells: number; exact: boolean;
  start(cell: number): number; cell(token: number): number; size(cell: number): number;
}

interface Layer {
  name: string; kind: "self" | "cross"; causal: boolean; queries: number; keys: number; visible: number[] | null;
  maps: Grid; top_keys: Grid | null; top_weights: Grid | null; entropy: Grid; received: Grid | null; offsets: Grid | null; repeat: Grid | null;
  from?: Stream; to?: Stream; rows?: Axis; cols?: Axis; reads?: string;
  twin?: Layer;         // the same on random tokens
  isTwin?: boolean;
}

/** A head: its labels, and its metrics by the keys of columns. */
interface Row { layer: number; head: number; module: string; labels: Label[]; of?: Layer; [metric: string]: any }

interface Look {
  title: string; rows: Row[]; columns: Column[]; rules: Rule[]; layers: Layer[]; streams: Stream[]; repeats: Stream[];
  provenance: Record<string, any>; offsets: number[]; similarity: Grid | null; made: [name: string, value: string][];
  finding: string; labeled: Record<string, number[]>; opening: number;
  composition: Partial<Record<"K" | "Q" | "V", [writer: number, reader: number, score: number][]>> & { unrelated?: number };
  column?: Map<string, Column>; places?: Map<string, number>; byName?: Map<string, number>; width?: number; labels?: string[]; read?: Stream[];
}

/** The weights of one head on a layer's tokens (report/weights.js). */
interface HeadRows {
  layer: Layer; map: Float32Array; keys: Float32Array | null; weights: Float32Array | null; received: Float32Array | null; kept: number;
  entropy?: Float32Array; offsets?: Float32Array;
}

/** A view of the report: `load` unpacks what `draw` shows; `kept` is what it adds to the address. */
interface View {
  title: string; more?: boolean; there?(): boolean; load?(): Promise<any>; draw(loaded?: any): void;
  kept?: Record<string, [read: () => string, write: (value: string) => void]>;
}

// --- charts (shared/chart.js) ------------------------------------------------------------------

/** A tick: `[value, text]`. */
type Tick = any[];
interface ChartAxis { range: number[]; title?: string; ticks?: Tick[]; turned?: number; mono?: boolean; lines?: boolean; share?(value: number): number }
interface Frame { x0: number; x1: number; y0: number; y1: number; width?: number; plain?: boolean }
interface Place { x: number; y: number; column: number; row: number; left: number; top: number; point?: any }
interface Cells {
  z: ArrayLike<number | null>[]; gap?: number;
  low?: number; high?: number; stops?: string[];
  fill?(value: number): string;
  across?: number[]; down?: number[]; lost?: string;
}
interface ChartSpec {
  width: number; height: number; margin: { l: number; r: number; t: number; b: number };
  x: ChartAxis; y: ChartAxis;
  grid?: Cells; ramp?: Tick[];
  bars?: number[][]; frames?: Frame[]; guides?: number[][];
  lines?: { points: number[][]; color: string; width?: number; dash?: string; dots?: boolean; more?: Record<string, string> }[];
  areas?: { points: number[][]; color: string; opacity: number }[];
  points?: { x: number; y: number; size?: number; color: string; path: string; edge?: number; faint?: boolean; error?: number[]; [more: string]: any }[];
  words?: { x: number; y: number; text: string; size?: number; color: string; path?: string }[];
  hover?(event: PointerEvent, place: Place): void;
  click?(place: Place): void;
  zoom?(ranges: { xaxis: number[]; yaxis: number[] } | undefined): void;
  across?: boolean;  // zoom goes along x alone
  leave?(): void;
  over?(spec: ChartSpec): Node[];
  says?: { title?: string; scale?: string; random?: boolean; marks?: Tick[]; labels?: string[] };
  area?: { x: number; y: number; width: number; height: number };
  toX?(value: number): number;
  toY?(value: number): number;
}

/** An element with an id: of any kind, with what charts and lists keep on it. */
interface Box extends HTMLElement {
  value: string; checked: boolean; disabled: boolean; open: boolean;
  tHead: HTMLTableSectionElement; tBodies: HTMLCollectionOf<HTMLTableSectionElement>;
  chart?: ChartSpec; dragged?: boolean; streams?: Stream[]; look?: Look;
}

// --- the timeline ------------------------------------------------------------------------------

interface Statistic { key: string; title: string; short: string; unit: string; kind: string; meaning: string; bounds?: { low: number; high: number; least: number } }
interface Alarm { step: number; head: number; rule: string; statistic: string; value: number | null; number?: number }
interface Steps { first: number; last: number; count: number; middle: number; from: number; to: number }
interface Run {
  name: string; first: number[]; last: number[]; count: number[]; crowd: Record<string, (number | null)[][]>; made: [string, string][];
  columns: Steps[]; alarms: Alarm[]; values: Map<string, Float32Array>; errors: Map<string, Float32Array>;
  scalars: Record<string, [steps: number[], values: (number | null)[]]>;
}

// --- the trace ---------------------------------------------------------------------------------

interface Trace {
  tokens: string[]; generated: string[]; sinks: number[]; sunk: number; weighted: boolean;
  heads: [name: string, module: string, copying: number | null][]; retrieval: number[];
  total: Record<string, any>; by_token: any; by_head: any; by_both: any; tables?: Record<string, (row: number) => number[][]>;
  segments: { names: string[]; all: number[][]; retrieval: number[][] }; made: [name: string, value: string][];
}

// --- the document ------------------------------------------------------------------------------

// What a selector finds here is known from the page's own HTML.
interface ParentNode { querySelector(selectors: string): any; querySelectorAll(selectors: string): NodeListOf<any> }
interface EventTarget { closest?(selectors: string): any }
