// A modal dialog of the browser: it keeps the focus inside and closes by Escape.
import { html, useEffect, useRef } from "./html.js";
import { IconButton } from "./icons.js";
import { t } from "./i18n.js";

export function Dialog({ title, onClose, wide = false, children }) {
  const ref = useRef(null);
  useEffect(() => {
    const before = document.activeElement;
    ref.current.showModal();
    return () => before?.focus?.();
  }, []);
  const outside = (event) => event.target === ref.current && onClose();
  return html`
    <dialog ref=${ref} class=${wide ? "wide" : ""} aria-label=${title} onClose=${onClose} onMouseDown=${outside}>
      <header class="dialog-head">
        <h2>${title}</h2>
        <${IconButton} icon="close" label=${t("close")} onClick=${onClose} />
      </header>
      ${children}
    </dialog>
  `;
}
