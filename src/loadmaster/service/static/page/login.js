import { html, useState } from "./html.js";
import { problemWords } from "./api.js";
import { t } from "./i18n.js";
import { login } from "./session.js";
import { store, use } from "./state.js";

export function Login() {
  const asked = use((s) => s.login);
  const [key, setKey] = useState("");
  const [busy, setBusy] = useState(false);
  if (asked === null) return null;
  const send = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await login(key.trim());
    } catch (error) {
      store.set({ login: { error: problemWords(error) } });
    }
    setBusy(false);
  };
  return html`
    <div class="login">
      <form onSubmit=${send} aria-labelledby="login-title">
        <h1 id="login-title">${t("login.title")}</h1>
        <p class="muted">${t("login.help")}</p>
        <label>
          <span>${t("login.key")}</span>
          <input type="password" name="key" autocomplete="current-password" required autofocus value=${key}
            aria-invalid=${asked.error ? "true" : "false"} aria-describedby="login-error" onInput=${(e) => setKey(e.currentTarget.value)} />
        </label>
        <p id="login-error" class="problem" role="alert">${asked.error}</p>
        <button class="primary" disabled=${busy || !key.trim()}>${t("login.open")}</button>
      </form>
    </div>
  `;
}
