// The deployment's state as the server tells it, through one stream of events.
import { ask } from "./api.js";
import { refreshSession } from "./session.js";
import { store } from "./state.js";
import { addSnapshot, loadHistory } from "./series.js";

const LOG_LINES = 500;
const REOPEN_MS = 3000;
const HIDDEN_MS = 20_000;
let source = null;

const handlers = {
  state(data) {
    const before = store.get().engine?.state;
    store.set({ engine: { ...data, at: Date.now() / 1000 } });
    if (before !== undefined && before !== data.state && data.state === "ready") refreshSession();
  },
  plan: (plan) => store.set({ plan }),
  snapshot(snapshot) {
    addSnapshot(snapshot);
    store.set({ snapshot });
  },
  findings: (data) => store.set({ findings: Array.isArray(data) ? data : (data.findings ?? []) }),
  reconcile: (reconcile) => store.set({ reconcile }),
  log(data) {
    const lines = data.lines ?? [];
    store.set(({ log }) => ({ log: (data.reset ? lines : [...log, ...lines]).slice(-LOG_LINES) }));
  },
  verify: (data) => hearVerify(data),
};

export function openEvents() {
  if (source !== null) return;
  source = new EventSource("api/events");
  source.onopen = () => store.set({ connected: true, offline: false, log: [] });
  for (const [name, handle] of Object.entries(handlers)) {
    source.addEventListener(name, (event) => handle(JSON.parse(event.data)));
  }
  source.onerror = () => {
    store.set({ connected: false });
    if (source?.readyState !== EventSource.CLOSED) return; // it connects again by itself
    source = null;
    setTimeout(openEvents, REOPEN_MS);
  };
  loadHistory();
}

// A browser opens six connections to a server over all its tabs; a tab that nobody sees holds none.
let leaving = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(leaving);
  if (!document.hidden) {
    if (store.get().session !== null && store.get().login === null) openEvents();
    return;
  }
  leaving = setTimeout(() => {
    source?.close();
    source = null;
  }, HIDDEN_MS);
});

function hearVerify(data) {
  store.set(({ verify }) => {
    const steps = verify.steps.slice();
    for (const step of data.steps ?? (data.step ? [data.step] : data.name ? [data] : [])) {
      const at = steps.findIndex((one) => one.name === step.name);
      if (at === -1) steps.push(step);
      else steps[at] = step;
    }
    const ended = data.done === true || "ok" in data;
    return { verify: { ...verify, steps, running: ended ? false : true, ok: ended ? (data.ok ?? null) : null, ended: ended || verify.ended, error: data.error ?? null } };
  });
}

export async function runVerify() {
  store.set({ verify: { running: true, steps: [], ok: null, ended: false, error: null } });
  try {
    const report = await ask("POST", "api/verify", { json: {} });
    if (report?.steps) hearVerify({ ...report, done: true });
  } catch (error) {
    store.set(({ verify }) => ({ verify: { ...verify, running: false, error } }));
  }
}

window.addEventListener("online", () => store.set({ offline: false }));
window.addEventListener("offline", () => store.set({ offline: true }));
