import { createStore, useStore } from "./store.js";
import { catalogue } from "./catalogue.js";
import { remember, remembered } from "./storage.js";

export const LANGUAGES = { en: "English", zh: "简体中文" };

function preferred() {
  const chosen = remembered("language", "");
  if (chosen in LANGUAGES) return chosen;
  for (const wanted of navigator.languages ?? [navigator.language ?? "en"]) {
    const short = wanted.toLowerCase().split("-")[0];
    if (short in LANGUAGES) return short;
  }
  return "en";
}

const words = createStore({ language: preferred() });

export const language = () => words.get().language;
export const useLanguage = () => useStore(words, (state) => state.language);

export const locale = () => (language() === "zh" ? "zh-CN" : "en-US");

export function applyLanguage() {
  document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
}

export function setLanguage(value) {
  remember("language", value);
  words.set({ language: value });
  applyLanguage();
}

/** The string ``key`` with {name} filled in. A pair of strings is singular and plural, by ``values.n``. */
export function t(key, values = {}) {
  let text = catalogue[language()][key] ?? catalogue.en[key];
  if (text === undefined) return key;
  if (Array.isArray(text)) text = text[values.n === 1 ? 0 : 1];
  return text.replace(/\{(\w+)\}/g, (whole, name) => {
    const value = values[name];
    if (value === undefined) return whole;
    return typeof value === "number" ? value.toLocaleString(locale()) : String(value);
  });
}

export const known = (key) => key in catalogue.en;
