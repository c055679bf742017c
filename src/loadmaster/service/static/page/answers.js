// Answers that are being written: asked for, followed, stopped, taken up again after a reload or a lost connection.
import { useEffect, useState } from "./html.js";
import { ApiError } from "./api.js";
import { browserRepository } from "./browserrepository.js";
import { changeMessage, loadList, repository, reread } from "./conversations.js";
import { moveDraft } from "./drafts.js";
import { t } from "./i18n.js";
import { refreshSession } from "./session.js";
import { readEvents } from "./stream.js";
import { remember } from "./storage.js";
import { model, notify, place, store } from "./state.js";

const RETRIES_MS = [300, 1000, 2000, 4000, 8000];
const SAVE_EVERY_MS = 1000;

/** One answer in the making. ``state``: waiting, queued, thinking, answering, lost, then done, stopped or failed. */
class Answer {
  constructor(conversation, message) {
    this.conversation = conversation;
    this.id = message.id;
    this.text = message.text ?? "";
    this.thinking = message.thinking ?? "";
    this.state = "waiting";
    this.place = null;
    this.numbers = message.numbers ?? null;
    this.error = null;
    this.begun = performance.now();
    this.listeners = new Set();
    this.abort = new AbortController();
    this.drawing = 0;
    this.before = null; // the messages that it takes the place of
  }

  get empty() {
    return this.state !== "done" && this.text === "" && this.thinking === "";
  }

  listen(listener) {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Tell who draws, once a frame. */
  changed() {
    if (this.drawing) return;
    this.drawing = (document.hidden ? (f) => setTimeout(f, 200) : requestAnimationFrame)(() => {
      this.drawing = 0;
      for (const listener of [...this.listeners]) listener();
    });
  }

  /** ``at``: the place of this piece in the whole; what is known beyond it is replaced. */
  add(kind, piece, at) {
    const known = this[kind];
    this[kind] = at === known.length ? known + piece : known.slice(0, at) + piece;
    this.state = this.text !== "" ? "answering" : "thinking";
    this.changed();
  }
}

const live = new Map(); // id of the answer -> Answer

const watchers = new Set(); // told when an answer begins or ends

function enter(answer) {
  live.set(answer.id, answer);
  for (const watcher of [...watchers]) watcher();
}

function leave(answer) {
  live.delete(answer.id);
  for (const watcher of [...watchers]) watcher();
}

const answering = (conversation) => [...live.values()].find((one) => one.conversation === conversation) ?? null;

function useWatched() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const watcher = () => redraw((n) => n + 1);
    watchers.add(watcher);
    return () => watchers.delete(watcher);
  }, []);
}

/** Whether an answer is being written in this conversation. */
export function useAnswering(conversation) {
  useWatched();
  return answering(conversation) !== null;
}

/** The answer in the making under this id, drawn again as it grows; null when there is none. */
export function useAnswer(id) {
  useWatched();
  const [, redraw] = useState(0);
  const answer = live.get(id) ?? null;
  useEffect(() => answer?.listen(() => redraw((n) => n + 1)), [answer]);
  return answer;
}

function hear(answer, name, data) {
  if (name === "delta") {
    for (const kind of ["thinking", "text"]) if (data[kind] !== undefined) answer.add(kind, data[kind], data.at);
  } else if (name === "queue") {
    answer.state = "queued";
    answer.place = data.place ?? null;
    answer.changed();
  } else if (name === "numbers") {
    answer.numbers = { ...answer.numbers, ...data };
    answer.changed();
  } else if (name === "done") {
    answer.numbers = data.numbers ?? answer.numbers;
    answer.state = data.state;
    noticeKept(data.stored);
  } else if (name === "error") {
    answer.error = { code: data.code, message: data.message, findings: data.findings ?? [] };
    answer.numbers = data.numbers ?? answer.numbers;
    noticeKept(data.stored);
    answer.state = "failed";
  }
}

/** The server's disk did not take the answer: said once, and the page turns to keeping things itself. */
function noticeKept(stored) {
  if (stored !== false) return;
  notify(t("message.not_stored"), "problem");
  refreshSession();
}

const over = (answer) => ["done", "stopped", "failed"].includes(answer.state);

function settle(answer) {
  leave(answer);
  const { current } = store.get();
  if (answer.before && answer.empty) {
    // nothing came in its place: what was there stays
    const again = answer.state === "failed" ? answer.error : null;
    const messages = answer.before.map((one) => (one.id === answer.old ? { ...one, again } : one));
    if (current?.id === answer.conversation) store.set({ current: { ...current, messages } });
  } else if (answer.before) remember(`edit.${answer.before[answer.before.findIndex((one) => one.id === answer.old) - 1]?.id}`, "");
  changeMessage(answer.id, {
    text: answer.text,
    thinking: answer.thinking || null,
    state: answer.state,
    error: answer.error,
    numbers: answer.numbers,
  });
  for (const listener of [...answer.listeners]) listener();
  loadList();
}

/** Follow a server's answer to its end; a lost connection is taken up where it broke. */
async function follow(answer, response) {
  for (let attempt = 0; ; attempt++) {
    try {
      if (response === null) response = await repository().attach(answer.conversation, answer, answer.abort.signal);
      const before = answer.text.length;
      await readEvents(response, (name, data) => hear(answer, name, data));
      if (answer.text.length > before) attempt = 0;
      if (over(answer)) break;
    } catch (error) {
      if (error.name === "AbortError") break;
      if (error instanceof ApiError && error.status === 404) break; // it is over; what was written is in the store
      if (error instanceof ApiError && error.status === 401) {
        store.set({ login: { error: null } });
        break;
      }
    }
    if (attempt >= RETRIES_MS.length) break;
    answer.state = "lost";
    answer.changed();
    response = null;
    await new Promise((resolve) => setTimeout(resolve, RETRIES_MS[attempt]));
  }
  if (over(answer)) {
    settle(answer);
    return;
  }
  try {
    const kept = (await reread(answer.conversation)).messages.find((one) => one.id === answer.id);
    if (kept) Object.assign(answer, { text: kept.text, thinking: kept.thinking ?? "", numbers: kept.numbers, error: kept.error });
    answer.state = kept && kept.state !== "streaming" ? kept.state : "failed";
  } catch {
    answer.state = "failed";
  }
  if (answer.state === "failed") answer.error ??= { code: "connection_lost", message: "" };
  settle(answer);
}

/** Ask the server. Resolves when the question is accepted; raises ApiError when it is not, and nothing has changed. */
async function askServer(conversation, body) {
  const abort = new AbortController();
  const { picture_facts: facts, ...sent } = body;
  if (facts) sent.pictures = facts.map(({ sha256, name, original_width, original_height }) => ({ sha256, name, original_width, original_height }));
  const response = await repository().answer(conversation, sent, abort.signal);
  let answer = null;
  let refused = null;
  const started = new Promise((resolve, reject) => {
    const first = [];
    const hearFirst = (name, data) => {
      if (answer !== null) hear(answer, name, data);
      else if (name === "start") resolve((answer = begin(conversation, data, body, abort)));
      else if (name === "error") reject((refused = new ApiError(503, data.code, data.message, null, data.findings ?? [])));
      else first.push([name, data]);
      if (answer !== null) for (const [n, d] of first.splice(0)) hear(answer, n, d);
    };
    readEvents(response, hearFirst).then(
      () => {
        if (answer === null) reject(new ApiError(0, "connection_lost", ""));
        else if (over(answer)) settle(answer);
        else follow(answer, null);
      },
      (error) => {
        if (answer === null) reject(error.name === "AbortError" ? error : new ApiError(0, "connection_lost", ""));
        else if (error.name === "AbortError") return;
        else follow(answer, null);
      },
    );
  });
  await started;
  if (refused) throw refused;
}

/** The messages before an answer that is written anew; what it replaces is kept until it begins. */
function replaced(answer, messages, { regenerate, text }) {
  const index = messages.findIndex((one) => one.id === regenerate);
  const end = messages[index]?.role === "assistant" ? index : index + 1;
  answer.old = messages[end]?.id;
  if (answer.old) answer.before = messages;
  return messages.slice(0, end).map((one, i) => (text && i === end - 1 ? { ...one, text } : one));
}

function begin(conversation, data, body, abort) {
  const { current } = store.get();
  const answerMessage = { ...data.assistant, state: "streaming" };
  let messages = current?.id === conversation ? current.messages : [];
  const answer = new Answer(conversation, answerMessage);
  if (body.continue !== undefined) {
    messages = messages.map((one) => (one.id === body.continue ? answerMessage : one));
  } else {
    if (body.regenerate !== undefined) {
      messages = replaced(answer, messages, body);
    } else if (data.user) {
      messages = [...messages, data.user];
    }
    messages = [...messages, answerMessage];
  }
  answer.abort = abort;
  enter(answer);
  if (current?.id === conversation) store.set({ current: { ...current, title: data.title ?? current.title, messages } });
  return answer;
}

/** Ask with conversations kept in this browser: the events are the same, the keeping is ours. */
async function askBrowser(conversation, body) {
  const abort = new AbortController();
  const before = store.get().current?.messages;
  const { response, conversation: kept, answer: message, save } = await repository().answer(conversation, body, abort.signal);
  const answer = new Answer(conversation, message);
  answer.abort = abort;
  if (body.regenerate !== undefined) replaced(answer, before, body);
  enter(answer);
  const { current } = store.get();
  if (current?.id === conversation) store.set({ current: { ...kept, messages: [...kept.messages] } });
  const offset = message.text.length;
  const keep = async () => {
    if (answer.before && answer.empty) return;
    Object.assign(message, { text: answer.text, thinking: answer.thinking || null, numbers: answer.numbers, error: answer.error });
    message.state = over(answer) ? answer.state : "streaming";
    return save();
  };
  const saving = setInterval(keep, SAVE_EVERY_MS);
  // a continued answer: the server counts from where its own piece begins
  const listen = (name, data) => hear(answer, name, name === "delta" && data.text !== undefined ? { ...data, at: data.at + offset } : data);
  readEvents(response, listen)
    .then(() => {
      if (!over(answer)) Object.assign(answer, { state: "failed", error: { code: "connection_lost", message: "" } });
    })
    .catch(() => {
      const stopped = answer.state !== "failed" && answer.stopped;
      Object.assign(answer, stopped ? { state: "stopped" } : { state: "failed", error: { code: "connection_lost", message: "" } });
    })
    .finally(async () => {
      clearInterval(saving);
      await keep();
      settle(answer);
    });
}

/** A new conversation. It is opened where the page still stands at ``mine.at``, which becomes its place. */
export async function beginConversation(mine, sent) {
  const current = { settings: {}, messages: [], title: "", ...(await repository().create()) };
  const { opening, asking } = store.get();
  if (mine.at !== place(store.get()) || opening !== null) return current;
  moveDraft(current.id, sent);
  mine.at = current.id;
  store.set({ current, asking: asking && { ...asking, at: current.id } });
  history.replaceState(null, "", `#/c/${encodeURIComponent(current.id)}`);
  return current;
}

/** Ask in a conversation, else in the open one. Raises ApiError when the question is not accepted. */
export async function askQuestion(body, current = store.get().current) {
  if (store.get().session?.storage === "browser") await browserRepository.adopt(current);
  const full = { model: model()?.id, ...body };
  if (store.get().session?.storage === "browser") await askBrowser(current.id, full);
  else await askServer(current.id, full);
  loadList();
}

/** Take up answers of a conversation that were under way when the page was loaded. */
export function takeUp(conversation) {
  for (const message of conversation.messages) {
    if (message.state !== "streaming" || live.has(message.id)) continue;
    const answer = new Answer(conversation.id, message);
    answer.state = message.text ? "answering" : "waiting";
    enter(answer);
    follow(answer, null);
  }
}

export async function stopAnswer(conversation) {
  const answer = answering(conversation);
  if (answer) answer.stopped = true;
  try {
    await repository().stop(conversation);
  } catch {
    answer?.abort.abort();
  }
}
