// Numbers with their units. Unknown is said in words, never 0.
import { locale, t } from "./i18n.js";

const GIB = 2 ** 30;

export function number(value, digits = 0) {
  if (value === null || value === undefined || Number.isNaN(value)) return t("unknown");
  return value.toLocaleString(locale(), { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

export const bareGib = (bytes, digits = 1) => (bytes === null || bytes === undefined ? "–" : number(bytes / GIB, digits));

export const gib = (bytes, digits = 1) => (bytes === null || bytes === undefined ? t("unknown") : `${bareGib(bytes, digits)} GiB`);

/** How the parts of one card are written: {unit, write}, in MiB where all of them are under a GiB. */
export function scaleOf(bytes) {
  const [unit, one, digits] = bytes < GIB ? ["MiB", 2 ** 20, 0] : ["GiB", GIB, 2];
  const least = 10 ** -digits;
  const write = (value) => (value == null ? "–" : value > 0 && value / one < least / 2 ? `<${number(least, digits)}` : number(value / one, digits));
  return { unit, write };
}

export function size(bytes) {
  if (bytes === null || bytes === undefined) return t("unknown");
  if (bytes < 2 ** 20) return `${number(bytes / 1024, 0)} KiB`;
  if (bytes < GIB) return `${number(bytes / 2 ** 20, 1)} MiB`;
  return gib(bytes, 1);
}

export function seconds(value) {
  if (value === null || value === undefined) return t("unknown");
  if (value < 10) return `${number(value, Number.isInteger(value) ? 0 : 2)} s`;
  if (value < 120) return `${number(value, 0)} s`;
  return `${number(value / 60, 0)} min`;
}

export const percent = (share, digits = 0) =>
  share === null || share === undefined ? t("unknown") : `${number(share * 100, digits)} %`;

export function dayGroup(epoch, now = new Date()) {
  const start = new Date(now.getFullYear(), now.getMonth(), now.getDate()).getTime() / 1000;
  if (epoch >= start) return "list.today";
  if (epoch >= start - 86400) return "list.yesterday";
  if (epoch >= start - 6 * 86400) return "list.week";
  return "list.older";
}

export const clock = (epoch) => new Date(epoch * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
