// Conversations in this browser, for deployments that keep none. The same functions as repository.js has.
import { request } from "./api.js";
import { forgetUploads, upload } from "./repository.js";
import { erase, read, readAll, write } from "./storage.js";

const now = () => Date.now() / 1000;
const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
const addresses = new Map();
let stopping = null;

const summary = ({ id, title, created, changed, messages }) => ({
  id, title, created, changed,
  messages: messages.length,
  pictures: messages.reduce((sum, one) => sum + (one.pictures?.length ?? 0), 0),
});

async function found(id) {
  const conversation = await read("conversations", id);
  if (!conversation) throw Object.assign(new Error("not found"), { code: "conversation_not_found", status: 404 });
  return conversation;
}

async function save(conversation) {
  conversation.changed = now();
  await write("conversations", conversation.id, conversation);
}

const base64 = (blob) =>
  new Promise((resolve) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result.slice(reader.result.indexOf(",") + 1));
    reader.readAsDataURL(blob);
  });

async function kindOf(blob) {
  const head = new Uint8Array(await blob.slice(0, 4).arrayBuffer());
  return head[0] === 0x89 ? "image/png" : "image/jpeg";
}

const blank = (role, text, pictures = []) => ({
  id: newId(), role, text, thinking: null, pictures, state: "done", error: null, numbers: null, created: now(),
});

/** Keep the pixels here, so that a later question can send them again when the server has dropped them. */
export async function keepPicture(picture) {
  await write("pictures", picture.sha256, picture.blob);
}

export const browserRepository = {
  async list(search) {
    const wanted = search.toLowerCase();
    const all = (await readAll("conversations"))
      .filter((one) => !wanted || one.title.toLowerCase().includes(wanted) || one.messages.some((m) => m.text.toLowerCase().includes(wanted)))
      .sort((a, b) => b.changed - a.changed);
    return { conversations: all.map(summary), more: false };
  },
  async get(id) {
    const conversation = await found(id);
    for (const message of conversation.messages) if (message.state === "streaming") message.state = "stopped"; // the page was closed
    return conversation;
  },
  async create(title) {
    const conversation = { id: newId(), title: title ?? "", created: now(), changed: now(), settings: {}, messages: [] };
    await save(conversation);
    return conversation;
  },
  async rename(id, title) {
    const conversation = await found(id);
    conversation.title = title;
    await save(conversation);
    return conversation;
  },
  remove: (id) => erase("conversations", id),
  /** Keep a conversation that the server cannot keep any more. */
  async adopt(conversation) {
    if (!(await read("conversations", conversation.id))) await save({ settings: {}, ...conversation, messages: [...conversation.messages] });
  },
  /** A response whose events are those of the server, with what is kept here changed as they pass. */
  async answer(id, body, signal) {
    const conversation = await found(id);
    const { messages } = conversation;
    let answer;
    if (body.continue !== undefined) answer = messages.find((one) => one.id === body.continue);
    else {
      if (body.regenerate !== undefined) {
        const index = messages.findIndex((one) => one.id === body.regenerate);
        messages.length = messages[index]?.role === "assistant" ? index : index + 1;
        if (body.text) messages.at(-1).text = body.text;
      } else {
        messages.push(blank("user", body.text, body.picture_facts ?? []));
      }
      answer = blank("assistant", "");
      messages.push(answer);
    }
    if (!conversation.title) conversation.title = (messages[0]?.text ?? "").slice(0, 60);
    const sendPictures = async () => {
      for (const picture of messages.flatMap((one) => one.pictures ?? [])) {
        const blob = await read("pictures", picture.sha256);
        if (blob) await upload({ sha256: picture.sha256, blob }, signal);
      }
    };
    await sendPictures();
    const sent = messages
      .slice(0, body.continue === undefined ? messages.indexOf(answer) : messages.indexOf(answer) + 1)
      .map(({ role, text, pictures }) => ({ role, text, pictures: (pictures ?? []).map((one) => one.sha256) }));
    const stop = new AbortController();
    signal?.addEventListener("abort", () => stop.abort());
    const ask = () =>
      request("POST", "api/answer", { json: { model: body.model, messages: sent, parameters: body.parameters }, signal: stop.signal });
    const response = await ask().catch(async (error) => {
      if (error.code !== "picture_missing") throw error;
      forgetUploads(); // the server keeps pictures for a while only
      await sendPictures();
      return ask();
    });
    answer.state = "streaming";
    conversation.settings = body.parameters ?? {};
    if (body.regenerate === undefined) await save(conversation);
    stopping = { id, stop };
    return { local: true, response, conversation, answer, offset: answer.text.length, save: () => save(conversation) };
  },
  attach() {
    throw Object.assign(new Error("gone"), { code: "answer_not_found", status: 404 });
  },
  async stop(id) {
    if (stopping?.id === id) stopping.stop.abort();
  },
  /** The same file as the server's: JSON with the pictures inside. */
  async exported(id) {
    const conversation = await found(id);
    const pictures = {};
    for (const { sha256 } of conversation.messages.flatMap((one) => one.pictures)) {
      const blob = await read("pictures", sha256);
      if (blob) pictures[sha256] = await base64(blob);
    }
    return new Blob([JSON.stringify({ schema: 1, conversation, pictures })], { type: "application/json" });
  },
  async imported(file) {
    const given = JSON.parse(await file.text());
    const source = given.conversation ?? {};
    if (!Array.isArray(source.messages)) throw Object.assign(new Error("no messages"), { code: "import_invalid" });
    for (const [sha256, text] of Object.entries(given.pictures ?? {})) {
      const blob = new Blob([Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0))]);
      await write("pictures", sha256, new Blob([blob], { type: await kindOf(blob) }));
    }
    const conversation = await browserRepository.create(String(source.title ?? ""));
    conversation.messages = source.messages.map((one) => ({
      ...blank(one.role === "assistant" ? "assistant" : "user", String(one.text ?? "")),
      pictures: (Array.isArray(one.pictures) ? one.pictures : []).filter((p) => /^[0-9a-f]{64}$/.test(p?.sha256)),
    }));
    await save(conversation);
    return conversation;
  },
  async pictureAddress(sha256) {
    if (!addresses.has(sha256)) {
      const blob = await read("pictures", sha256);
      addresses.set(sha256, blob ? URL.createObjectURL(blob) : `api/pictures/${sha256}`);
    }
    return addresses.get(sha256);
  },
};
