// The conversations: search, rename, export, delete, import; and the page's own choices below them.
import { html, useEffect, useRef, useState } from "./html.js";
import { exportConversation, goTo, importConversation, loadList, remove, rename, search } from "./conversations.js";
import { Dialog } from "./dialog.js";
import { dayGroup, size } from "./format.js";
import { LANGUAGES, language, setLanguage, t } from "./i18n.js";
import { Icon, IconButton } from "./icons.js";
import { StateDot } from "./statedot.js";
import { logout } from "./session.js";
import { store, use } from "./state.js";
import { setTheme, THEMES, theme } from "./theme.js";

export function Sidebar() {
  const session = use((s) => s.session);
  return html`
    <nav class="sidebar" aria-label=${t("list.title")}>
      <header>
        <strong class="brand">loadmaster</strong>
        <${StateDot} />
        <${IconButton} icon="close" class="icon-button only-phone" label=${t("close")} onClick=${() => store.set({ left: false })} />
      </header>
      <button type="button" class="new" onClick=${() => goTo(null)}><${Icon} name="plus" />${t("list.new")}</button>
      <${Search} />
      <${List} />
      <footer>
        ${session?.storage === "browser" && html`<p class="muted small-text">${t("list.in_browser")}</p>`}
        <${Quota} quota=${session?.quota} />
        <div class="row">
          <button type="button" class="quiet" aria-expanded=${use((s) => s.preferences)} onClick=${() => store.set({ preferences: true })}>
            <${Icon} name="gear" />${t("preferences")}
          </button>
          <span class="grow"></span>
          <${LanguageSwitch} />
        </div>
      </footer>
      <${Preferences} />
    </nav>
  `;
}

function Quota({ quota }) {
  if (!quota?.bytes || quota.used < quota.bytes / 2) return null;
  return html`<p class=${`small-text ${quota.used > quota.bytes * 0.9 ? "warning" : "muted"}`}>
    ${t("list.quota", { used: size(quota.used), all: size(quota.bytes) })}
  </p>`;
}

function LanguageSwitch() {
  const other = language() === "zh" ? "en" : "zh";
  return html`<button type="button" class="quiet" lang=${other} aria-label=${LANGUAGES[other]} onClick=${() => setLanguage(other)}>
    ${LANGUAGES[other]}
  </button>`;
}

function Search() {
  const text = use((s) => s.search);
  const timer = useRef(0);
  const change = (event) => {
    const { value } = event.currentTarget;
    clearTimeout(timer.current);
    timer.current = setTimeout(() => search(value), 150);
  };
  return html`<label class="search">
    <${Icon} name="search" />
    <input type="search" aria-label=${t("list.search")} placeholder=${t("list.search")} defaultValue=${text} onInput=${change} />
  </label>`;
}

function List() {
  const conversations = use((s) => s.conversations);
  const current = use((s) => s.current)?.id;
  const more = use((s) => s.more);
  const wanted = use((s) => s.search);
  if (conversations === null) return html`<div class="list" aria-busy="true"></div>`;
  if (conversations.length === 0) {
    return html`<div class="list"><p class="muted empty">${wanted ? t("list.nothing_found", { text: wanted }) : t("list.empty")}</p></div>`;
  }
  let group = null;
  return html`
    <div class="list">
      <ul>
        ${conversations.map((one) => {
          const its = dayGroup(one.changed);
          const head = its !== group;
          group = its;
          return html`
            ${head && html`<li class="group" key=${its}>${t(its)}</li>`}
            <${Entry} key=${one.id} one=${one} open=${one.id === current} />
          `;
        })}
      </ul>
      ${more && html`<button type="button" class="quiet more" onClick=${() => loadList(true)}>${t("list.more")}</button>`}
    </div>
  `;
}

const STEPS = { ArrowRight: "[aria-haspopup]", ArrowLeft: "a" };

function Entry({ one, open }) {
  const [menu, setMenu] = useState(false);
  const [editing, setEditing] = useState(false);
  const [asking, setAsking] = useState(false);
  const row = useRef(null);
  const title = one.title || t("list.untitled");
  const focus = (what) => row.current?.querySelector(what)?.focus();
  const renamed = (byKey) => {
    setEditing(false);
    if (byKey) setTimeout(() => focus("a"), 50);
  };
  if (editing) return html`<li ref=${row}><${Rename} one=${one} done=${renamed} /></li>`;
  const go = (event) => {
    event.preventDefault();
    goTo(one.id);
  };
  const close = () => {
    if (row.current.contains(document.activeElement)) focus("[aria-haspopup]");
    setMenu(false);
  };
  // one stop of Tab a conversation: the arrow to the right leads to its actions
  const keys = (event) => event.key in STEPS && !menu && (event.preventDefault(), focus(STEPS[event.key]));
  return html`
    <li ref=${row} class=${open ? "entry open" : "entry"} onKeyDown=${keys}>
      <a href=${`#/c/${encodeURIComponent(one.id)}`} aria-current=${open ? "page" : undefined} onClick=${go} title=${title}>
        <span class="title">${title}</span>
      </a>
      <${IconButton} icon="more" label=${t("list.menu", { title })} tabindex="-1" aria-keyshortcuts="ArrowRight" aria-haspopup="menu" aria-expanded=${menu} onClick=${() => setMenu(!menu)} />
      ${menu &&
      html`<${Menu} close=${close}>
        <button role="menuitem" type="button" onClick=${() => setEditing(true)}>${t("rename")}</button>
        <button role="menuitem" type="button" onClick=${() => exportConversation(one.id, one.title, "json")}>${t("export.json")}</button>
        <button role="menuitem" type="button" onClick=${() => exportConversation(one.id, one.title, "markdown")}>${t("export.markdown")}</button>
        <button role="menuitem" type="button" class="danger" onClick=${() => setAsking(true)}>${t("delete")}</button>
      <//>`}
      ${asking &&
      html`<${Dialog} title=${t("delete.title")} onClose=${() => setAsking(false)}>
        <p>${t("delete.text", { title })}</p>
        <div class="row end">
          <button type="button" onClick=${() => setAsking(false)}>${t("cancel")}</button>
          <button type="button" class="danger" onClick=${() => { setAsking(false); remove(one.id); }}>${t("delete")}</button>
        </div>
      <//>`}
    </li>
  `;
}

function Menu({ close, children }) {
  const ref = useRef(null);
  useEffect(() => {
    const items = () => [...ref.current.querySelectorAll("[role=menuitem]")];
    items()[0]?.focus();
    const outside = (event) => !ref.current?.contains(event.target) && close();
    setTimeout(() => document.addEventListener("click", outside), 0);
    return () => document.removeEventListener("click", outside);
  }, []);
  const keys = (event) => {
    const items = [...ref.current.querySelectorAll("[role=menuitem]")];
    const at = items.indexOf(document.activeElement);
    if (event.key === "Escape" || event.key === "Tab") close();
    else if (event.key === "ArrowDown") items[(at + 1) % items.length].focus();
    else if (event.key === "ArrowUp") items[(at + items.length - 1) % items.length].focus();
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return html`<div ref=${ref} class="menu" role="menu" onKeyDown=${keys} onClick=${close}>${children}</div>`;
}

function Rename({ one, done }) {
  const ref = useRef(null);
  useEffect(() => ref.current.select(), []);
  const ended = useRef(false); // leaving the field by a key takes the focus away as well
  const save = (byKey) => {
    if (ended.current) return;
    ended.current = true;
    const title = ref.current.value.trim();
    done(byKey);
    if (title && title !== one.title) rename(one.id, title);
  };
  const keys = (event) => {
    if (event.isComposing) return;
    if (event.key === "Enter") save(true);
    if (event.key !== "Escape") return;
    ended.current = true;
    done(true);
  };
  return html`<input ref=${ref} class="rename" aria-label=${t("rename")} defaultValue=${one.title} maxlength="200" onKeyDown=${keys} onBlur=${() => save(false)} />`;
}

function Preferences() {
  const open = use((s) => s.preferences);
  const session = use((s) => s.session);
  const [chosen, setChosen] = useState(theme());
  const file = useRef(null);
  if (!open) return null;
  const close = () => store.set({ preferences: false });
  const choose = (value) => {
    setTheme(value);
    setChosen(value);
  };
  return html`
    <${Dialog} title=${t("preferences")} onClose=${close}>
      <fieldset>
        <legend>${t("theme")}</legend>
        <div class="segments">
          ${THEMES.map((one) => html`<label><input type="radio" name="theme" checked=${chosen === one} onChange=${() => choose(one)} /><span>${t(`theme.${one}`)}</span></label>`)}
        </div>
      </fieldset>
      <fieldset>
        <legend>${t("language")}</legend>
        <div class="segments">
          ${Object.entries(LANGUAGES).map(
            ([one, name]) => html`<label lang=${one}><input type="radio" name="language" checked=${language() === one} onChange=${() => setLanguage(one)} /><span>${name}</span></label>`,
          )}
        </div>
      </fieldset>
      <fieldset>
        <legend>${t("list.title")}</legend>
        <p class="muted">${session?.storage === "browser" ? t("preferences.kept_here") : t("preferences.kept_on_server")}</p>
        ${session?.quota?.bytes && html`<p class="muted">${t("list.quota", { used: size(session.quota.used), all: size(session.quota.bytes) })}</p>`}
        <button type="button" onClick=${() => file.current.click()}>${t("import")}</button>
        <input ref=${file} type="file" hidden accept=".json,.zip,application/json,application/zip"
          onChange=${(e) => { const [one] = e.currentTarget.files; e.currentTarget.value = ""; close(); if (one) importConversation(one); }} />
      </fieldset>
      <p class="muted small-text">
        ${session && t("preferences.version", { version: session.version, deployment: session.deployment })}
        ${session?.user && html` · ${t("preferences.user", { user: session.user })}`}
      </p>
      ${session?.keys_required && session.user && html`<button type="button" onClick=${logout}><${Icon} name="out" />${t("logout")}</button>`}
    <//>
  `;
}
