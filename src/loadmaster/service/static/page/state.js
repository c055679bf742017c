// The state of the page. Nothing here is drawn or fetched; see conversations.js, answers.js and deployment.js.
import { createStore, useStore } from "./store.js";
import { remembered } from "./storage.js";

export const TABS = ["load", "live", "log", "check"];

export const store = createStore({
  session: null, // what GET /api/session said
  problem: null, // why the page cannot work: {code, message}
  login: null, // null: not asked for, else {error}
  offline: !navigator.onLine,
  conversations: null, // the list on the left; null: not read yet
  more: false, // older ones are left
  search: "",
  current: null, // {id, title, settings, messages} of the conversation that is open
  visit: 0, // how often an empty page was opened
  opening: null, // id of the conversation that is being read
  asking: null, // a question that the server has not accepted yet: {at: place, text, pictures}
  refusal: null, // why the last question was not accepted: {code, message}
  engine: null, // {state, phase, words, seconds, finding, at}
  plan: null,
  snapshot: null,
  findings: [],
  reconcile: null,
  log: [],
  verify: { running: false, steps: [], ok: null, error: null },
  connected: null, // the event stream: true, false, null before the first word
  left: false, // the drawer of conversations on a phone
  right: innerWidth >= 900 && (remembered("right", "") === "open" || (remembered("right", "") === "" && innerWidth >= 1280)),
  tab: TABS.includes(remembered("tab", "load")) ? remembered("tab", "load") : "load",
  settings: false, // the drawer of parameters
  preferences: false, // language, theme, import
  notice: null, // a short sentence that goes away: {text, kind}
});

/** What stands open: a conversation, or one of the empty pages where a new one begins. */
export const place = (s) => s.current?.id ?? `new ${s.visit}`;

// what stood beside the chat is not laid over it
matchMedia("(max-width: 899px)").addEventListener("change", ({ matches }) => matches && store.set({ right: false }));

export const use = (select) => useStore(store, select);

let noticeTimer = 0;

export function notify(text, kind = "note") {
  clearTimeout(noticeTimer);
  store.set({ notice: { text, kind } });
  noticeTimer = setTimeout(() => store.set({ notice: null }), 6000);
}

export function model(state = store.get()) {
  const models = state.session?.models ?? [];
  const wanted = remembered("model", "");
  return models.find((one) => one.id === wanted) ?? models[0] ?? null;
}
