// The frame of the page.
import { html, useEffect } from "./html.js";
import { Composer, DropTarget } from "./composer.js";
import { addressed, openConversation } from "./conversations.js";
import { Banner, Header } from "./header.js";
import { t, useLanguage } from "./i18n.js";
import { Login } from "./login.js";
import { Panel } from "./panel.js";
import { Sidebar } from "./sidebar.js";
import { store, use } from "./state.js";
import { Thread } from "./thread.js";

export function App() {
  useLanguage();
  const left = use((s) => s.left);
  const right = use((s) => s.right);
  const login = use((s) => s.login);
  const title = use((s) => s.current?.title);
  useEffect(() => {
    document.title = title ? `${title} · loadmaster` : "loadmaster";
  }, [title]);
  useEffect(() => {
    const moved = () => openConversation(addressed());
    window.addEventListener("popstate", moved);
    return () => window.removeEventListener("popstate", moved);
  }, []);
  if (login !== null) return html`<${Login} />`;
  const keys = (event) => event.key === "Escape" && left && store.set({ left: false });
  return html`
    <div class="app" data-left=${left ? "open" : "shut"} data-right=${right ? "open" : "shut"} onKeyDown=${keys}>
      <a class="skip" href="#question" onClick=${(e) => { e.preventDefault(); document.getElementById("question").focus(); }}>${t("skip")}</a>
      <${Sidebar} />
      ${left && html`<div class="veil" onClick=${() => store.set({ left: false })}></div>`}
      <main class="chat">
        <${Header} />
        <${Banner} />
        <${Thread} />
        <${Composer} />
      </main>
      <${Panel} />
      <${DropTarget} />
      <${Notice} />
    </div>
  `;
}

function Notice() {
  const notice = use((s) => s.notice);
  return html`<div class="notice-place" role="status" aria-live="polite">${notice && html`<p class=${`notice ${notice.kind}`}>${notice.text}</p>`}</div>`;
}
