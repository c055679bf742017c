// What the browser keeps: small choices, drafts, and conversations where the server keeps none.

const PREFIX = "loadmaster.";
const DATABASE = "loadmaster";
const STORES = ["conversations", "pictures", "drafts"];

export function remembered(name, otherwise) {
  try {
    return localStorage.getItem(PREFIX + name) ?? otherwise;
  } catch {
    return otherwise;
  }
}

export function remember(name, value) {
  try {
    localStorage.setItem(PREFIX + name, value);
  } catch {}
}

let opened = null;
const memory = Object.fromEntries(STORES.map((name) => [name, new Map()])); // where IndexedDB is refused

function database() {
  opened ??= new Promise((resolve) => {
    let request;
    try {
      request = indexedDB.open(DATABASE, 1);
    } catch {
      resolve(null);
      return;
    }
    request.onupgradeneeded = () => {
      for (const name of STORES) request.result.createObjectStore(name);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = request.onblocked = () => resolve(null);
  });
  return opened;
}

async function run(name, mode, action) {
  const db = await database();
  if (db === null) return null;
  return new Promise((resolve, reject) => {
    const transaction = db.transaction(name, mode);
    const request = action(transaction.objectStore(name));
    transaction.oncomplete = () => resolve(request?.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

export async function read(name, key) {
  if ((await database()) === null) return memory[name].get(key);
  return run(name, "readonly", (store) => store.get(key));
}

export async function readAll(name) {
  if ((await database()) === null) return [...memory[name].values()];
  return run(name, "readonly", (store) => store.getAll());
}

export async function write(name, key, value) {
  if ((await database()) === null) return void memory[name].set(key, value);
  return run(name, "readwrite", (store) => store.put(value, key));
}

export async function erase(name, key) {
  if ((await database()) === null) return void memory[name].delete(key);
  return run(name, "readwrite", (store) => store.delete(key));
}
