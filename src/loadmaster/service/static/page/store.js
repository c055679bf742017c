// One place for what the page knows. Components read a part of it and are drawn again when that part changes.
import { useEffect, useState } from "./html.js";

export function createStore(initial) {
  let state = initial;
  const listeners = new Set();
  return {
    get: () => state,
    set(change) {
      const patch = typeof change === "function" ? change(state) : change;
      state = { ...state, ...patch };
      for (const listener of [...listeners]) listener();
    },
    listen(listener) {
      listeners.add(listener);
      return () => listeners.delete(listener);
    },
  };
}

export function useStore(store, select) {
  const [, redraw] = useState(0);
  const value = select(store.get());
  useEffect(() => {
    let last = select(store.get());
    if (!Object.is(last, value)) redraw((n) => n + 1);
    return store.listen(() => {
      const now = select(store.get());
      if (!Object.is(now, last)) {
        last = now;
        redraw((n) => n + 1);
      }
    });
  }, [store]);
  return value;
}
