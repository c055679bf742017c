// Requests to the server. Errors carry the server's code and sentence.
import { known, t } from "./i18n.js";

export class ApiError extends Error {
  constructor(status, code, message, retryAfter = null, findings = []) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfter = retryAfter;
    this.findings = findings;
  }
}

async function errorOf(response) {
  let inner = {};
  try {
    inner = (await response.json()).error ?? {};
  } catch {}
  const wait = Number(response.headers.get("Retry-After")) || null;
  const code = String(inner.code ?? `http_${response.status}`);
  return new ApiError(response.status, code, inner.message ?? "", wait, inner.findings ?? []);
}

export async function request(method, path, { json, body, signal, headers = {} } = {}) {
  let response;
  try {
    response = await fetch(path, {
      method,
      signal,
      credentials: "same-origin",
      cache: "no-store",
      headers: json === undefined ? headers : { "Content-Type": "application/json", ...headers },
      body: json === undefined ? body : JSON.stringify(json),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "unreachable", "");
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

export async function ask(method, path, options) {
  const response = await request(method, path, options);
  return response.status === 204 ? null : response.json();
}

export function problemWords(error) {
  const key = `error.${error.code}`;
  if (known(key)) return t(key, { message: error.message, seconds: error.retryAfter ?? 5 });
  return error.message || t("error.other", { code: error.code ?? error.name ?? "?" });
}
