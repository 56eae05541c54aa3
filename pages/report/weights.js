// The weights of a head: its map, and the weights of single tokens.

import { ofHead } from "../shared/codec.js";
import { blocks } from "./look.js";
import { sceneOf } from "./state.js";

/**
 * The data for drawing one head's tokens: its map, and the keys that each query attends to most.
 * @param {Row} row
 * @param {Layer} layer
 * @returns {Promise<HeadRows>}
 */
export async function headRows(row, layer = sceneOf(row)) {
  const [map, keys, weights, received] = await Promise.all(
    [layer.maps, layer.top_keys, layer.top_weights, layer.received].map((grid) => (grid ? ofHead(grid, row.head) : null)));
  return { layer, map, keys, weights, received, kept: layer.top_keys?.shape[2] ?? 0 };
}

/**
 * The stored top keys of a query with their exact weights, as `[key, weight]`, largest first.
 * @param {HeadRows} rows
 * @param {number} query
 * @returns {[key: number, weight: number][]}
 */
export function topKeys({ keys, weights, kept }, query) {
  const places = Array.from({ length: kept }, (_, rank) => query * kept + rank);
  return places.filter((place) => keys[place] >= 0 && weights[place] > 0).map((place) => [keys[place], weights[place]]);
}

/**
 * The strongest keys of a query: the stored top keys or, if there are none and each map cell is one token pair, those of the map.
 * @param {HeadRows} rows
 * @param {number} query
 * @returns {[key: number, weight: number][]}
 */
export function strongest(rows, query) {
  if (rows.kept || !rows.layer.cols.exact || !rows.layer.rows.exact) return topKeys(rows, query);
  const line = tokenWeights(rows, query, "to");
  return [...line.keys()].filter((key) => line[key] > 0).sort((a, b) => line[b] - line[a]).slice(0, 8).map((key) => [key, line[key]]);
}

/**
 * A token's weight on each key ("to"), or each query's weight on it: exact for top keys and single-token cells, else a block mean.
 * @param {HeadRows} rows
 * @param {number} token
 * @param {string} direction
 */
export function tokenWeights(rows, token, direction) {
  const { layer, map, keys, weights, kept } = rows;
  const m = layer.cols.cells;
  if (direction === "to") {
    const found = new Float32Array(layer.to.tokens.length);
    const start = layer.rows.cell(token) * m;
    for (let key = 0; key < found.length; key++) {
      const cell = layer.cols.cell(key);
      found[key] = layer.causal && key > token ? 0 : map[start + cell] / layer.cols.size(cell);
    }
    for (const [key, value] of topKeys(rows, token)) found[key] = value;
    return found;
  }
  const found = new Float32Array(layer.from.tokens.length);
  const column = layer.cols.cell(token);
  for (let query = 0; query < found.length; query++) {
    found[query] = layer.causal && query < token ? 0 : map[layer.rows.cell(query) * m + column] / layer.cols.size(column);
    for (let place = query * kept; place < (query + 1) * kept; place++) if (keys[place] === token) found[query] = weights[place];
  }
  return found;
}

/**
 * The attention that each key received, summed over queries.
 * @param {HeadRows} rows
 */
export function receivedBy({ layer, received, map }) {
  if (received === null) {
    const n = layer.cols.cells;
    return Float32Array.from({ length: n }, (_, key) => map.reduce((sum, value, place) => (place % n === key ? sum + value : sum), 0));
  }
  const cut = blocks(layer.to.tokens.length, received.length);
  return Float32Array.from(layer.to.tokens, (_, key) => received[cut.cell(key)]);
}
