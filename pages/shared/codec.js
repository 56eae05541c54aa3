// Packed arrays (see headwise.report.codec): byte planes one after another, compressed with gzip, in base64.

import { $ } from "./dom.js";

/** The decompressed bytes of gzip data encoded in base64. */
async function unpack(text) {
  const letters = atob(text);
  const packed = new Uint8Array(letters.length);
  for (let index = 0; index < packed.length; index++) packed[index] = letters.charCodeAt(index);
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

export const unpackText = async (id) => new TextDecoder().decode(await unpack($(id).textContent));

/** Decodes a 2-byte float from its 16 bits. */
function half(code) {
  const [sign, power, rest] = [code & 0x8000 ? -1 : 1, (code >> 10) & 31, code & 1023];
  if (power === 31) return rest ? NaN : sign * Infinity;
  return sign * (power ? (1 + rest / 1024) * 2 ** (power - 15) : rest * 2 ** -24);
}

const HALVES = [];  // the value of every 16-bit code, filled on first use
const word = new DataView(new ArrayBuffer(4));

/** Decodes a float of `planes` bytes (2 or 4). */
function float(code, planes) {
  if (planes === 2) {
    if (!HALVES.length) for (let each = 0; each < 65536; each++) HALVES.push(half(each));
    return HALVES[code];
  }
  word.setUint32(0, code);
  return word.getFloat32(0);
}

/**
 * The numbers of a grid (see headwise.report.codec), unpacked once: `{ shape, values }`, with NaN for missing numbers.
 * @param {Grid} grid
 */
export function numbers(grid) {
  grid.unpacked ??= unpack(grid.data).then((bytes) => {
    const count = bytes.length / grid.planes;
    const one = count / grid.shape[0];
    const values = new Float32Array(count);
    for (let index = 0; index < count; index++) {
      let code = 0;
      for (let plane = 0; plane < grid.planes; plane++) code = code * 256 + bytes[plane * count + index];
      if (grid.unit !== undefined) values[index] = float(code, grid.planes) * grid.unit;
      else if (grid.levels === undefined) values[index] = code - 1;
      else if (code > grid.levels) values[index] = NaN;
      else {
        const share = code / grid.levels;
        values[index] = grid.scale[Math.floor(index / one)] * (grid.root ? share * share : share);
      }
    }
    return { shape: grid.shape, values };
  });
  return grid.unpacked;
}

/**
 * One head's part of a grid, as a flat array.
 * @param {Grid} grid
 * @param {number} head
 */
export async function ofHead(grid, head) {
  const { shape, values } = await numbers(grid);
  const size = values.length / shape[0];
  return values.subarray(head * size, (head + 1) * size);
}
