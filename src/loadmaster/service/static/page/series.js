import { ask } from "./api.js";

const MOST = 900; // points; one a second
const listeners = new Set();

/** time: epoch seconds. Each column is as long as ``time``; null: not known then. */
export const series = { time: [], columns: new Map() };

export function onSeries(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

const tell = () => listeners.forEach((listener) => listener());

export const column = (name) => series.columns.get(name) ?? series.time.map(() => null);
export const names = () => [...series.columns.keys()];

let last = null; // {at, tokens} of the snapshot before

function figures(snapshot) {
  const found = {};
  for (const card of snapshot.cards ?? []) {
    found[`used.${card.index}`] = card.used_bytes ?? null;
    found[`utilization.${card.index}`] = card.utilization ?? null;
  }
  const engine = snapshot.engine;
  if (engine) {
    found.running = engine.running ?? null;
    found.waiting = engine.waiting ?? null;
    found.cache = engine.kv_cache_usage ?? null;
    found.first_token = engine.time_to_first_token_s ?? null;
    found.tokens = engine.tokens_per_s ?? rate(snapshot.at, engine.generation_tokens);
  }
  return found;
}

function rate(at, tokens) {
  if (tokens === null || tokens === undefined) return null;
  const before = last;
  last = { at, tokens };
  if (before === null || at <= before.at || tokens < before.tokens) return null;
  return (tokens - before.tokens) / (at - before.at);
}

export function addSnapshot(snapshot) {
  const found = figures(snapshot);
  series.time.push(snapshot.at);
  for (const name of Object.keys(found)) {
    if (!series.columns.has(name)) series.columns.set(name, Array(series.time.length - 1).fill(null));
  }
  for (const [name, values] of series.columns) values.push(found[name] ?? null);
  if (series.time.length > MOST) {
    series.time.shift();
    for (const values of series.columns.values()) values.shift();
  }
  tell();
}

export async function loadHistory(seconds = MOST) {
  let history;
  try {
    history = await ask("GET", `api/history?seconds=${seconds}`);
  } catch {
    return; // the charts begin with the first reading
  }
  const time = history.at ?? history.time ?? [];
  const before = series.time[0] ?? Infinity;
  const count = time.findIndex((at) => at >= before);
  const kept = count === -1 ? time.length : count;
  if (kept === 0) return;
  for (const [name, values] of Object.entries(history.columns ?? {})) {
    const own = series.columns.get(name) ?? Array(series.time.length).fill(null);
    series.columns.set(name, [...values.slice(0, kept), ...own]);
  }
  series.time.unshift(...time.slice(0, kept));
  for (const [name, values] of series.columns) {
    if (values.length < series.time.length) series.columns.set(name, [...Array(series.time.length - values.length).fill(null), ...values]);
  }
  tell();
}
