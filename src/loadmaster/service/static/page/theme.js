import { remember, remembered } from "./storage.js";

export const THEMES = ["system", "light", "dark"];

const dark = matchMedia("(prefers-color-scheme: dark)");
const listeners = new Set();

export function theme() {
  const chosen = remembered("theme", "system");
  return THEMES.includes(chosen) ? chosen : "system";
}

export function shade() {
  return theme() === "system" ? (dark.matches ? "dark" : "light") : theme();
}

export function applyTheme() {
  document.documentElement.dataset.theme = shade();
  document.querySelector("meta[name=theme-color]")?.setAttribute("content", shade() === "dark" ? "#161615" : "#fbfbfa");
  for (const listener of listeners) listener();
}

export function setTheme(value) {
  remember("theme", value);
  applyTheme();
}

export function onTheme(listener) {
  listeners.add(listener);
  return () => listeners.delete(listener);
}

dark.addEventListener("change", applyTheme);
