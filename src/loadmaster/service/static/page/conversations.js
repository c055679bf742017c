// The list of conversations and the one that is open: what changes them.
import { browserRepository } from "./browserrepository.js";
import { problemWords } from "./api.js";
import { t } from "./i18n.js";
import { serverRepository } from "./repository.js";
import { notify, store } from "./state.js";

export const repository = () => (store.get().session?.storage === "browser" ? browserRepository : serverRepository);

/** The id in the address: #/c/ID. */
export const addressed = () => decodeURIComponent(location.hash.match(/^#\/c\/(.+)$/)?.[1] ?? "") || null;

export function goTo(id) {
  const hash = id === null ? "#/" : `#/c/${encodeURIComponent(id)}`;
  if (location.hash !== hash) history.pushState(null, "", hash);
  store.set({ left: false });
  return openConversation(id);
}

let listing = 0;

export async function loadList(older = false) {
  const { search, conversations } = store.get();
  const turn = ++listing;
  try {
    const before = older ? (conversations?.at(-1)?.changed ?? null) : null;
    const found = await repository().list(search, before);
    if (turn !== listing) return;
    const listed = older ? [...(conversations ?? []), ...found.conversations] : found.conversations;
    const { current } = store.get();
    const title = listed.find((one) => one.id === current?.id)?.title;
    store.set({ conversations: listed, more: found.more, current: title && title !== current.title ? { ...current, title } : current });
  } catch (error) {
    if (error.status === 401) store.set({ login: { error: null } });
    else if (turn === listing && store.get().conversations === null) store.set({ conversations: [] });
  }
}

export function search(text) {
  store.set({ search: text });
  return loadList();
}

/** Open a conversation, or none (a new one begins with the first question). */
export async function openConversation(id) {
  store.set({ refusal: null });
  if (id === null) {
    store.set(({ visit }) => ({ current: null, opening: null, visit: visit + 1 }));
    return;
  }
  if (store.get().current?.id === id) return;
  store.set({ opening: id });
  try {
    const conversation = await repository().get(id);
    if (store.get().opening === id) store.set({ current: conversation, opening: null });
  } catch (error) {
    if (store.get().opening !== id) return;
    store.set({ opening: null, current: null });
    if (error.status === 401) store.set({ login: { error: null } });
    else notify(error.status === 404 ? t("list.gone") : problemWords(error), "problem");
    if (error.status === 404) history.replaceState(null, "", "#/");
  }
}

/** Read the open conversation again: after a connection was lost, or an answer ended elsewhere. */
export async function reread(id) {
  const conversation = await repository().get(id);
  if (store.get().current?.id === id) store.set({ current: conversation });
  return conversation;
}

export function changeMessage(mid, change) {
  store.set(({ current }) => ({
    current: current && {
      ...current,
      messages: current.messages.map((one) => (one.id === mid ? { ...one, ...change } : one)),
    },
  }));
}

export async function rename(id, title) {
  try {
    await repository().rename(id, title);
  } catch (error) {
    notify(problemWords(error), "problem");
    return;
  }
  store.set(({ conversations, current }) => ({
    conversations: conversations?.map((one) => (one.id === id ? { ...one, title } : one)),
    current: current?.id === id ? { ...current, title } : current,
  }));
}

export async function remove(id) {
  try {
    await repository().remove(id);
  } catch (error) {
    notify(problemWords(error), "problem");
    return;
  }
  store.set(({ conversations }) => ({ conversations: conversations?.filter((one) => one.id !== id) }));
  if (store.get().current?.id === id) await goTo(null);
}

const fileName = (title, ending) =>
  `${(title || t("list.untitled")).replace(/[^\p{L}\p{N} _-]+/gu, " ").trim().slice(0, 60) || "conversation"}.${ending}`;

export async function exportConversation(id, title, format) {
  try {
    const blob = await repository().exported(id, format);
    const link = document.createElement("a");
    link.href = URL.createObjectURL(blob);
    link.download = fileName(title, blob.type.includes("zip") ? "zip" : "json");
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  } catch (error) {
    notify(problemWords(error), "problem");
  }
}

export async function importConversation(file) {
  try {
    const conversation = await repository().imported(file);
    await loadList();
    await goTo(conversation.id ?? conversation.conversations?.[0]?.id ?? null);
    notify(t("import.done"));
  } catch (error) {
    notify(error instanceof SyntaxError ? t("error.import_invalid") : problemWords(error), "problem");
  }
}
