// Conversations on the server, and the questions that are asked in them.
import { ask, request } from "./api.js";

const at = (id, rest = "") => `api/conversations/${encodeURIComponent(id)}${rest}`;

export const serverRepository = {
  /** {conversations, more}: newest first. ``before``: ``changed`` of the last one that is known. */
  async list(search, before = null, limit = 50) {
    const query = new URLSearchParams({ limit: String(limit + 1) });
    if (search) query.set("search", search);
    if (before !== null) query.set("before", String(before));
    const { conversations } = await ask("GET", `api/conversations?${query}`);
    return { conversations: conversations.slice(0, limit), more: conversations.length > limit };
  },
  get: (id) => ask("GET", at(id)),
  create: (title) => ask("POST", "api/conversations", { json: title ? { title } : {} }),
  rename: (id, title) => ask("PATCH", at(id), { json: { title } }),
  remove: (id) => ask("DELETE", at(id)),
  /** The stream of an answer. ``body``: {model, text?, pictures?, regenerate?, continue?, parameters}. */
  answer: (id, body, signal) => request("POST", at(id, "/answer"), { json: body, signal }),
  /** The stream of an answer that is under way, from what is known of it on. */
  attach: (id, { text, thinking }, signal) =>
    request("GET", at(id, `/answer?from=${text.length}&thinking_from=${thinking.length}`), { signal }),
  stop: (id) => ask("POST", at(id, "/stop"), { json: {} }),
  exported: async (id, format) => (await request("GET", at(id, `/export?format=${format}`))).blob(),
  imported: (file) =>
    ask("POST", "api/conversations/import", { body: file, headers: { "Content-Type": file.type || "application/json" } }),
  pictureAddress: async (sha256) => `api/pictures/${sha256}`,
};

const known = new Set(); // hashes that the server has taken from this page

/** The server says that it has lost some: each is sent again when it is needed next. */
export const forgetUploads = () => known.clear();

/** Put a picture into the server's store; what it has taken once is not sent again. */
export async function upload(picture, signal) {
  if (known.has(picture.sha256)) return;
  await ask("PUT", `api/pictures/${picture.sha256}`, { body: picture.blob, signal, headers: { "Content-Type": picture.blob.type } });
  known.add(picture.sha256);
}
