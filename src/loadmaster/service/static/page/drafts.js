// What is being written and not sent. It is kept in this browser with every keystroke, pictures too.
import { upload } from "./repository.js";
import { keepPicture } from "./browserrepository.js";
import { ApiError, problemWords } from "./api.js";
import { t } from "./i18n.js";
import { PictureError, prepare } from "./picture.js";
import { gib, number, size } from "./format.js";
import { model, notify, store } from "./state.js";
import { createStore, useStore } from "./store.js";
import { erase, read, remember, remembered, write } from "./storage.js";

/** pictures: [{id, file, name, area, url, state: "reading" | "ready" | "refused", over, words, prepared, sent}] */
const drafts = createStore({ key: null, text: "", pictures: [] });
export const useDraft = (select) => useStore(drafts, select);
export const draft = () => drafts.get();

const aside = new Map(); // key -> pictures of drafts that were left
const picturesOf = (key) => (drafts.get().key === key ? drafts.get().pictures : (aside.get(key) ?? []));
const find = (id) => [drafts.get().pictures, ...aside.values()].flat().find((one) => one.id === id);

const keyOf = (conversation) => conversation ?? "new";
let nextId = 1;
let opened = 0;

export async function openDraft(conversation) {
  const key = keyOf(conversation);
  const { key: left, pictures } = drafts.get();
  if (left === key) return;
  const turn = ++opened;
  if (pictures.length > 0) aside.set(left, pictures);
  drafts.set({ key, text: remembered(`draft.${key}`, ""), pictures: aside.get(key) ?? [] });
  if (aside.delete(key)) return;
  let kept = [];
  try {
    kept = (await read("drafts", key)) ?? [];
  } catch {
    // the browser's store is damaged or full; the text is kept elsewhere
  }
  if (turn === opened) for (const { file, name, area } of kept) add(file, name, area, false);
}

export function setText(text) {
  drafts.set({ text });
  remember(`draft.${drafts.get().key}`, text);
}

function keep({ key } = drafts.get()) {
  const kept = picturesOf(key).filter((one) => one.state !== "refused").map(({ file, name, area }) => ({ file, name, area }));
  const done = kept.length > 0 ? write("drafts", key, kept) : erase("drafts", key);
  done.catch(() => notify(t("draft.pictures_not_kept"), "problem"));
}

/** The draft goes with the conversation that its question begins. */
export function moveDraft(conversation, sent) {
  const { key, text } = drafts.get();
  sent.key = keyOf(conversation);
  drafts.set({ key: keyOf(conversation) });
  setText(text);
  keep();
  remember(`draft.${key}`, "");
  erase("drafts", key).catch(() => {});
}

/** What is sent now, whatever is opened, typed or added before it is accepted. */
export function holdDraft() {
  const { key, text, pictures } = drafts.get();
  return { key, text, ids: pictures.map((one) => one.id) };
}

function setPictures(key, pictures) {
  if (drafts.get().key === key) drafts.set({ pictures });
  else aside.set(key, pictures);
}

/** The draft was sent: forget that much of it. */
export function clearDraft({ key, text, ids }) {
  const gone = (one) => ids.includes(one.id);
  const pictures = picturesOf(key);
  for (const one of pictures) if (gone(one) && one.url) URL.revokeObjectURL(one.url);
  setPictures(key, pictures.filter((one) => !gone(one)));
  const now = drafts.get().key === key ? drafts.get().text : remembered(`draft.${key}`, "");
  const rest = now.startsWith(text) ? now.slice(text.length).trimStart() : now;
  remember(`draft.${key}`, rest);
  if (drafts.get().key === key) drafts.set({ text: rest });
  keep({ key });
}

function change(id, patch) {
  for (const key of [drafts.get().key, ...aside.keys()])
    setPictures(key, picturesOf(key).map((one) => (one.id === id ? { ...one, ...patch } : one)));
}

export const pictureWords = (error) => {
  if (!(error instanceof PictureError)) return problemWords(error);
  const { bytes, width, height } = error.values;
  return t(`picture.${error.code}`, { size: size(bytes), limit: gib(2 ** 30 / 5, 1), width: number(width), height: number(height) });
};

async function read_(id) {
  const one = find(id);
  if (!one) return;
  const most = model()?.max_images ?? null;
  const its = [drafts.get().pictures, ...aside.values()].find((all) => all.includes(one));
  const ready = its.filter((other) => other.id !== id && other.state === "ready").length;
  if (most !== null && ready >= most) {
    change(id, { state: "refused", over: true, words: t(most === 0 ? "picture.none_taken" : "picture.too_many", { n: most }) });
    return;
  }
  try {
    const prepared = await prepare(one.file, model(), one.area);
    const now = find(id);
    if (!now) return;
    if (now.url) URL.revokeObjectURL(now.url);
    change(id, { state: "ready", words: null, prepared, url: URL.createObjectURL(prepared.blob), sent: null });
    if (store.get().session?.storage === "browser") await keepPicture(prepared);
    await send(id);
  } catch (error) {
    change(id, { state: "refused", words: pictureWords(error), prepared: null });
  }
}

/** Upload a prepared picture while the question is still being typed; a failure is met again when it is sent. */
function send(id) {
  const one = find(id);
  if (!one?.prepared) return Promise.resolve();
  const sent = upload(one.prepared);
  change(id, { sent });
  return sent.catch(() => change(id, { sent: null }));
}

// One picture after the other: ten photographs at once would take a phone's memory.
let reading = Promise.resolve();

function add(file, name, area = null, kept = true) {
  const id = nextId++;
  drafts.set(({ pictures }) => ({ pictures: [...pictures, { id, file, name, area, url: null, state: "reading", words: null }] }));
  reading = reading.then(() => read_(id));
  if (kept) keep();
}

export function addFiles(files) {
  for (const file of files) {
    const name = file.name || t("picture.unnamed");
    add(file, name);
  }
}

export function removePicture(id) {
  const one = drafts.get().pictures.find((picture) => picture.id === id);
  if (one?.url) URL.revokeObjectURL(one.url);
  drafts.set(({ pictures }) => ({ pictures: pictures.filter((picture) => picture.id !== id) }));
  for (const other of drafts.get().pictures) if (other.over) readAgain(other.id);
  keep();
}

function readAgain(id, patch) {
  change(id, { ...patch, state: "reading", over: false });
  reading = reading.then(() => read_(id));
}

export function cropPicture(id, area) {
  readAgain(id, { area });
  keep();
}

/** All pictures of what is sent, in the server's store. Raises ApiError. */
export async function uploaded({ ids }) {
  await reading;
  const facts = [];
  for (const one of ids.map(find)) {
    if (!one) continue; // taken away meanwhile
    if (one.state !== "ready") throw new ApiError(0, "picture_refused", "");
    await upload(one.prepared);
    const { sha256, width, height, original_width, original_height } = one.prepared;
    facts.push({ sha256, width, height, original_width, original_height, name: one.name });
  }
  return facts;
}
