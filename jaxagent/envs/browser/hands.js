// Runs in the tree's world: finds an element of the last list again, and does to it what is no click or key.
({index, act, text}) => {
  if (act === 'scroll') {  // the page, or else the first place in it that can be scrolled
    const down = text === 'down', own = document.scrollingElement;
    const places = [own, ...[...document.querySelectorAll('body *')].slice(0, 20000).filter(el => el.scrollHeight > el.clientHeight + 1 && /auto|scroll/.test(getComputedStyle(el).overflowY))];
    return places.some(el => {
      const before = el?.scrollTop;
      if (el) el.scrollTop += (down ? 0.8 : -0.8) * (el === own ? innerHeight : el.clientHeight);
      return el?.scrollTop !== before;
    });
  }
  const ref = globalThis.refs?.[index];
  const el = ref?.el.nodeType === 3 ? ref.el.parentElement : ref?.el;
  if (!el?.isConnected || !ref.el.isConnected) return {problem: 'is no longer on the page'};
  const inputs = ['INPUT', 'SELECT', 'TEXTAREA'].includes(el.tagName);
  if (el.matches(':disabled')) return {problem: 'is disabled'};
  if (el.tagName === 'INPUT' && el.type === 'file') return {problem: 'takes a file, and there is none'};
  const changed = () => { for (const kind of ['input', 'change']) el.dispatchEvent(new Event(kind, {bubbles: true, composed: true})); };
  if (act === 'select') {
    if (el.tagName !== 'SELECT') return {problem: 'is no list to select from: click it'};
    const plain = one => one.replace(/\s+/g, ' ').trim(), options = [...el.options];
    const option = options.find(one => plain(one.label) === plain(text)) ?? options.find(one => plain(one.label).toLowerCase() === plain(text).toLowerCase());
    if (!option) return {problem: 'has no such option'};
    if (option.disabled) return {problem: 'has that option, which is disabled'};
    if (!el.multiple) for (const other of options) other.selected = false;
    option.selected = true;
    changed();
    return {done: true};
  }
  if (act === 'click' && el.tagName === 'SELECT') return {problem: 'is a list: select an option of it'};
  if (act === 'type') {
    if (!el.isContentEditable && !(inputs && el.tagName !== 'SELECT')) return {problem: 'is no field to type into'};
    if (el.readOnly) return {problem: 'is read-only'};
    if (['checkbox', 'radio', 'button', 'submit', 'reset', 'image'].includes(el.type)) return {problem: 'is no field to type into'};
    if (['range', 'color', 'date', 'time', 'month', 'week', 'datetime-local'].includes(el.type)) {
      const form = {date: '2024-12-31', time: '13:45', month: '2024-12', week: '2024-W52', 'datetime-local': '2024-12-31T13:45', color: '#ff0000', range: '5'}[el.type];
      const before = el.value;
      el.value = text;
      if (el.value !== text) { el.value = before; return {problem: `takes a value such as ${form}`}; }
      changed();
      return {done: true};
    }
  }
  el.scrollIntoView({block: 'nearest', inline: 'nearest'});
  let boxes;
  if (ref.rect) { const range = document.createRange(); range.selectNodeContents(ref.el); boxes = [...range.getClientRects()]; }
  else boxes = [...el.getClientRects()];
  boxes = boxes.filter(box => box.width && box.height);
  if (!boxes.length) boxes = [...(el.labels || [])].flatMap(label => [...label.getClientRects()]).filter(box => box.width && box.height);
  if (!boxes.length) return {problem: 'can no longer be seen'};
  const deepest = (doc, x, y) => { let hit = doc.elementFromPoint(x, y); while (hit?.shadowRoot) { const inner = hit.shadowRoot.elementFromPoint(x, y); if (!inner || inner === hit) break; hit = inner; } return hit; };
  const hits = (box, fx, fy) => {
    let x = box.left + box.width * fx, y = box.top + box.height * fy;
    const inFrame = deepest(el.ownerDocument, x, y);
    for (let view = el.ownerDocument.defaultView; view !== window; view = view.parent) {
      const holder = view.frameElement, outer = holder.getBoundingClientRect();
      x += outer.left + holder.clientLeft; y += outer.top + holder.clientTop;
      if (deepest(holder.ownerDocument, x, y) !== holder) return {cover: deepest(holder.ownerDocument, x, y)};
    }
    for (let node = inFrame; node; node = node.parentNode ?? node.host) if (node === el || (node.control === el && node.tagName === 'LABEL')) return {x, y};
    return {cover: inFrame};
  };
  let cover = null;
  for (const box of boxes.slice(0, 3)) for (const [fx, fy] of [[.5, .5], [.2, .5], [.8, .5], [.5, .2], [.5, .8]]) {
    const hit = hits(box, fx, fy);
    if ('x' in hit) {
      for (const one of [el.closest('a[target], area[target]'), el.form])  // pages open in this tab
        if (one?.target && !['_self', '_parent', '_top'].includes(one.target) && !document.getElementsByName(one.target).length) one.removeAttribute('target');
      if (act === 'type') { el.focus(); if (el.select) el.select(); else getSelection().selectAllChildren(el); }
      return hit;
    }
    cover ??= hit.cover;
  }
  const other = cover && globalThis.refs.find(one => one.el === cover || cover.contains(one.el) || one.el.contains?.(cover));
  return {problem: 'is covered', by: other?.item ?? (cover && ['box', (cover.innerText || cover.id || cover.tagName).slice(0, 60)])};
}
