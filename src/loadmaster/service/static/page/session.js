// Who is asking, and what the server offers: models, limits, where conversations are kept.
import { ask } from "./api.js";
import { loadList, openConversation, addressed } from "./conversations.js";
import { openEvents } from "./deployment.js";
import { store } from "./state.js";

const RETRY_MS = 2000;
let retrying = 0;

export async function loadSession() {
  clearTimeout(retrying);
  try {
    const session = await ask("GET", "api/session");
    store.set({ session, problem: null, offline: false });
    if (session.keys_required && session.user === null) {
      store.set({ login: { error: null } });
      return;
    }
    store.set({ login: null });
    openEvents();
    await Promise.all([loadList(), openConversation(addressed())]);
  } catch (error) {
    if (error.status === 401) {
      store.set({ login: { error: null } });
      return;
    }
    store.set({ problem: { code: error.code, message: error.message } });
    retrying = setTimeout(loadSession, RETRY_MS);
  }
}

export async function refreshSession() {
  try {
    const session = await ask("GET", "api/session");
    if (JSON.stringify(session) !== JSON.stringify(store.get().session)) store.set({ session });
  } catch {
  }
}

export async function login(key) {
  await ask("POST", "api/login", { json: { key } });
  await loadSession();
}

export async function logout() {
  await ask("POST", "api/logout", { json: {} });
  history.replaceState(null, "", "#/"); // the next one at this browser does not begin in somebody else's conversation
  location.reload();
}
