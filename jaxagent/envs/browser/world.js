// Runs in every frame before the page's own scripts: time that stands still until `advance`, seeded chance, no motion.
// START: milliseconds since 1970; SEED: u32.
((START, SEED) => {
  const turn = (channel => () => new Promise(done => { channel.port1.onmessage = done; channel.port2.postMessage(0); }))(new MessageChannel());
  const sleep = (wait => ms => new Promise(done => wait(done, ms)))(setTimeout.bind(window));
  let now = START, state = SEED, last = 0, pending = 0;
  const random = () => {  // mulberry32
    state = (state + 0x6d2b79f5) | 0;
    let t = Math.imul(state ^ (state >>> 15), 1 | state);
    t = (t + Math.imul(t ^ (t >>> 7), 61 | t)) ^ t;
    return ((t ^ (t >>> 14)) >>> 0) / 4294967296;
  };
  Math.random = random;
  crypto.getRandomValues = array => {
    const bytes = new Uint8Array(array.buffer, array.byteOffset, array.byteLength);
    for (let i = 0; i < bytes.length; i++) bytes[i] = random() * 256;
    return array;
  };
  crypto.randomUUID = () => '10000000-1000-4000-8000-100000000000'.replace(/[018]/g, c => (c ^ (random() * 16 >> c / 4)).toString(16));

  const RealDate = Date;
  window.Date = new Proxy(RealDate, {
    construct: (target, args, self) => Reflect.construct(target, args.length ? args : [now], self),
    apply: () => new RealDate(now).toString(),
    get: (target, key) => key === 'now' ? () => now : Reflect.get(target, key),
  });
  RealDate.prototype.constructor = window.Date;
  performance.now = () => now - START;
  const elapsed = () => now - START, dates = Intl.DateTimeFormat.prototype;
  for (const [proto, name, get] of [
    [Performance.prototype, 'timeOrigin', () => START], [Performance.prototype, 'timing', () => new Proxy({}, {get: () => START})],
    [Event.prototype, 'timeStamp', elapsed], [AnimationTimeline.prototype, 'currentTime', elapsed],
    [File.prototype, 'lastModified', () => START], [Document.prototype, 'lastModified', () => '01/01/2024 12:00:00'],
    [Navigator.prototype, 'connection', () => undefined],
  ]) Object.defineProperty(proto, name, {get});
  for (const name of ['getEntries', 'getEntriesByName', 'getEntriesByType']) performance[name] = () => [];
  const {format: {get: format}, formatToParts: {value: parts}} = Object.getOwnPropertyDescriptors(dates);
  Object.defineProperty(dates, 'format', {get() { const own = format.call(this); return (date = now) => own(date); }});
  dates.formatToParts = function (date = now) { return parts.call(this, date); };
  delete window.Temporal;

  const timers = new Map();
  const add = (f, ms, every, args) => {
    const wait = Math.max(1, Number(ms) || 0);
    timers.set(++last, {at: now + wait, every: every ? wait : 0, call: () => typeof f === 'function' ? f(...args) : (0, eval)(f)});
    return last;
  };
  window.setTimeout = (f, ms, ...args) => add(f, ms, false, args);
  window.setInterval = (f, ms, ...args) => add(f, ms, true, args);
  window.requestAnimationFrame = f => add(() => f(now - START), 16, false, []);
  window.requestIdleCallback = f => add(() => f({didTimeout: false, timeRemaining: () => 50}), 16, false, []);
  for (const name of ['clearTimeout', 'clearInterval', 'cancelAnimationFrame', 'cancelIdleCallback'])
    window[name] = id => { timers.delete(Number(id)); };

  // What is on its way from the site: the clock waits for it.
  const waits = promise => { pending++; return promise.finally(() => pending--); };
  const realFetch = window.fetch;
  window.fetch = (...args) => waits(realFetch(...args));
  for (const name of ['text', 'json', 'blob', 'arrayBuffer', 'formData']) {
    const read = Response.prototype[name];
    Response.prototype[name] = function (...args) { return waits(read.apply(this, args)); };
  }
  const arrives = (thing, kinds) => waits(new Promise(done => { for (const kind of kinds) thing.addEventListener(kind, done, {once: true}); }));
  const send = XMLHttpRequest.prototype.send;
  XMLHttpRequest.prototype.send = function (...args) { arrives(this, ['loadend']); return send.apply(this, args); };
  new MutationObserver(records => {
    for (const {addedNodes} of records) for (const node of addedNodes)
      if (node.tagName === 'SCRIPT' && node.src && document.readyState === 'complete') arrives(node, ['load', 'error']);
  }).observe(document, {childList: true, subtree: true});
  const answered = async budget => { while (pending && budget.ms > 0) { await sleep(5); budget.ms -= 5; } };

  // Lets so many milliseconds pass, once in an action: what timers are due runs, one after the other. The page cannot
  // replace it. Before the page has loaded nothing passes, unless it is `stopped` on the way.
  let done = -1;
  Object.defineProperty(window, '__advance', {value: async (action, ms, patience, stopped) => {
    if (action === done || (document.readyState !== 'complete' && !stopped)) return;
    done = action;
    const end = now + ms, budget = {ms: patience};
    await turn();
    await answered(budget);
    for (let calls = 0; calls < 5000; calls++) {
      let first = null, id = 0;
      for (const [number, timer] of timers) if (timer.at <= end && (!first || timer.at < first.at)) [first, id] = [timer, number];
      if (!first) break;
      now = Math.max(now, first.at);
      if (first.every) first.at = now + first.every; else timers.delete(id);
      try { first.call(); } catch (error) { reportError(error); }
      await turn();
      await answered(budget);
    }
    now = end;
    for (let i = 0; i < frames.length && i < 20; i++) try { await frames[i].__advance(action, ms, patience, stopped); } catch {}
  }});

  const still = new CSSStyleSheet();
  still.replaceSync('*, *::before, *::after { transition: none !important; animation: none !important; scroll-behavior: auto !important; }');
  document.adoptedStyleSheets = [still];
  const animate = Element.prototype.animate;
  Element.prototype.animate = function (...args) { const motion = animate.apply(this, args); try { motion.finish(); } catch {} return motion; };

  // Which elements listen to the mouse: the tree gives them a number.
  const mark = element => { if (element instanceof Element && element !== document.documentElement && element !== document.body) element.setAttribute('data-listens', ''); };
  const kinds = ['click', 'mousedown', 'mouseup', 'pointerdown', 'pointerup', 'dblclick'];
  const listen = EventTarget.prototype.addEventListener;
  EventTarget.prototype.addEventListener = function (kind, ...rest) { if (kinds.includes(kind)) mark(this); return listen.call(this, kind, ...rest); };
  for (const proto of [HTMLElement.prototype, SVGElement.prototype]) for (const kind of kinds) {
    const own = Object.getOwnPropertyDescriptor(proto, 'on' + kind);
    if (own) Object.defineProperty(proto, 'on' + kind, {...own, set(f) { if (f) mark(this); own.set.call(this, f); }});
  }
  window.open = url => { location.href = url || 'about:blank'; return null; };
})(START, SEED)
