// What is being written and not sent. It is kept in this browser with every keystroke, pictures too.
import { upload } from "./repository.js";
import { keepPicture } from "./browserrepository.js";
import { problemWords } from "./api.js";
import { t } from "./i18n.js";
import { PictureError, prepare } from "./picture.js";
import { gib, number, size } from "./format.js";
import { model, notify, store } from "./state.js";
import { createStore, useStore } from "./store.js";
import { erase, read, remember, remembered, write } from "./storage.js";

/** pictures: [{id, file, name, area, url, state: "reading" | "ready" | "refused", words, prepared, sent}] */
const drafts = createStore({ key: null, text: "", pictures: [] });
export const useDraft = (select) => useStore(drafts, select);
export const draft = () => drafts.get();

const keyOf = (conversation) => conversation ?? "new";
let nextId = 1;

export async function openDraft(conversation) {
  const key = keyOf(conversation);
  if (drafts.get().key === key) return;
  drafts.set({ key, text: remembered(`draft.${key}`, ""), pictures: [] });
  let kept = [];
  try {
    kept = (await read("drafts", key)) ?? [];
  } catch {
    // the browser's store is damaged or full; the text is kept elsewhere
  }
  if (drafts.get().key === key) for (const { file, name, area } of kept) add(file, name, area, false);
}

export function setText(text) {
  drafts.set({ text });
  remember(`draft.${drafts.get().key}`, text);
}

function keep() {
  const { key, pictures } = drafts.get();
  const kept = pictures.filter((one) => one.state !== "refused").map(({ file, name, area }) => ({ file, name, area }));
  const done = kept.length > 0 ? write("drafts", key, kept) : erase("drafts", key);
  done.catch(() => notify(t("draft.pictures_not_kept"), "problem"));
}

/** The draft goes with the conversation that its question begins. */
export function moveDraft(conversation) {
  const { key, text } = drafts.get();
  drafts.set({ key: keyOf(conversation) });
  setText(text);
  keep();
  remember(`draft.${key}`, "");
  erase("drafts", key).catch(() => {});
}

/** The draft was sent: forget it. */
export function clearDraft() {
  for (const one of drafts.get().pictures) if (one.url) URL.revokeObjectURL(one.url);
  drafts.set({ pictures: [] });
  setText("");
  keep();
}

function change(id, patch) {
  drafts.set(({ pictures }) => ({ pictures: pictures.map((one) => (one.id === id ? { ...one, ...patch } : one)) }));
}

export const pictureWords = (error) => {
  if (!(error instanceof PictureError)) return problemWords(error);
  const { bytes, width, height } = error.values;
  return t(`picture.${error.code}`, { size: size(bytes), limit: gib(2 ** 30 / 5, 1), width: number(width), height: number(height) });
};

async function read_(id) {
  const one = drafts.get().pictures.find((picture) => picture.id === id);
  if (!one) return;
  const most = model()?.max_images ?? null;
  const ready = drafts.get().pictures.filter((other) => other.id !== id && other.state === "ready").length;
  if (most !== null && ready >= most) {
    change(id, { state: "refused", words: t(most === 0 ? "picture.none_taken" : "picture.too_many", { n: most }) });
    return;
  }
  try {
    const prepared = await prepare(one.file, model(), one.area);
    const now = drafts.get().pictures.find((picture) => picture.id === id);
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
  const one = drafts.get().pictures.find((picture) => picture.id === id);
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
  keep();
}

export function cropPicture(id, area) {
  change(id, { area, state: "reading" });
  reading = reading.then(() => read_(id));
  keep();
}

/** All pictures of the draft, in the server's store. Raises ApiError. */
export async function uploaded() {
  await reading;
  const facts = [];
  for (const one of drafts.get().pictures) {
    if (!one.prepared || one.state !== "ready") continue;
    await upload(one.prepared);
    const { sha256, width, height, original_width, original_height } = one.prepared;
    facts.push({ sha256, width, height, original_width, original_height, name: one.name });
  }
  return facts;
}
