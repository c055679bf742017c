// Where the page begins.
import { html, render } from "./html.js";
import { App } from "./app.js";
import { applyLanguage } from "./i18n.js";
import { loadSession } from "./session.js";
import { applyTheme } from "./theme.js";

applyLanguage();
applyTheme();
const root = document.getElementById("root");
root.replaceChildren();
render(html`<${App} />`, root);
loadSession();
