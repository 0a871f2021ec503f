// Runs in a world of its own, where no script of the page reaches it: reads the page as elements, and finds them again.
// What it returns tree.py writes as text. Elements are remembered by their place in the last list, never by a number.
({most, look}) => {
  const SKIPPED = new Set(['SCRIPT', 'STYLE', 'NOSCRIPT', 'TEMPLATE', 'HEAD', 'META', 'LINK', 'TITLE', 'OPTION', 'DATALIST']);
  const LEAVES = new Set(['link', 'button', 'textbox', 'searchbox', 'password', 'file', 'spinbutton', 'slider', 'combobox', 'listbox',
    'checkbox', 'radio', 'switch', 'tab', 'menuitem', 'menuitemcheckbox', 'menuitemradio', 'option', 'treeitem', 'date', 'color']);
  const INPUTS = {button: 'button', submit: 'button', reset: 'button', image: 'button', checkbox: 'checkbox', radio: 'radio', range: 'slider',
    number: 'spinbutton', password: 'password', file: 'file', search: 'searchbox', color: 'color',
    date: 'date', time: 'date', month: 'date', week: 'date', 'datetime-local': 'date'};
  const CHARS = 4000;
  const refs = globalThis.refs = [];
  const items = [];
  let above = 0, below = 0, here = 0, looked = 0;

  const roleOf = el => {
    const tag = el.tagName.toUpperCase(), own = (el.getAttribute('role') || '').trim().split(/\s+/)[0];
    if (tag === 'INPUT' && ['password', 'file'].includes(el.type)) return el.type;
    if (own && (LEAVES.has(own) || own === 'heading' || own === 'img')) return own === 'img' ? 'image' : own;
    if (tag === 'A' || tag === 'AREA') return el.hasAttribute('href') ? 'link' : '';
    if (tag === 'BUTTON' || tag === 'SUMMARY') return 'button';
    if (tag === 'INPUT') return el.list ? 'combobox' : INPUTS[el.type] || 'textbox';
    if (tag === 'TEXTAREA' || (el.isContentEditable && !el.parentElement?.isContentEditable)) return 'textbox';
    if (tag === 'SELECT') return el.multiple || el.size > 1 ? 'listbox' : 'combobox';
    if (/^H[1-6]$/.test(tag)) return 'heading';
    return tag === 'IMG' || tag === 'CANVAS' ? 'image' : '';
  };
  const textOf = el => {
    const text = (el.innerText ?? el.textContent ?? '').slice(0, CHARS).trim();
    return text || [...el.querySelectorAll('[alt], [aria-label], title')].map(inner => inner.getAttribute('alt') || inner.getAttribute('aria-label') || inner.textContent).join(' ');
  };
  const nameOf = (el, role) => {
    const by = (el.getAttribute('aria-labelledby') || '').split(/\s+/).map(id => id && el.getRootNode().getElementById?.(id)).filter(Boolean);
    if (by.length) return by.map(textOf).join(' ');
    const label = el.getAttribute('aria-label');
    if (label?.trim()) return label;
    if (el.tagName === 'INPUT' && INPUTS[el.type] === 'button')
      return el.value || el.alt || {submit: 'Submit', reset: 'Reset', image: 'Submit'}[el.type] || el.title || '';
    const labels = [...(el.labels || [])].map(one => {
      const copy = one.cloneNode(true);
      for (const inner of copy.querySelectorAll('input, select, textarea, button')) inner.remove();
      return copy.textContent;
    }).join(' ').trim();
    if (labels) return labels;
    if (role === 'image') return el.alt || el.title || '';
    if (!['INPUT', 'SELECT', 'TEXTAREA'].includes(el.tagName) && role !== 'textbox') { const text = textOf(el); if (text) return text; }
    const named = el.getAttribute('placeholder') || el.title || '';
    return named || (['button', 'link', 'tab', 'menuitem'].includes(role) ? el.id || el.classList[0] || '' : '');
  };
  const valueOf = (el, role) => {
    if (role === 'password') return el.value ? '•'.repeat(Math.min(el.value.length, 50)) : null;
    if (el.tagName === 'SELECT') return [...el.selectedOptions].map(option => option.label.slice(0, CHARS)).join(', ');
    if (['checkbox', 'radio', 'file', 'button'].includes(role)) return null;
    if (['INPUT', 'TEXTAREA'].includes(el.tagName)) return el.value ? el.value.slice(0, CHARS) : null;
    if (role === 'textbox') return textOf(el) || null;
    return el.getAttribute('aria-valuetext') ?? el.getAttribute('aria-valuenow');
  };
  const statesOf = (el, role) => {
    const aria = name => el.getAttribute('aria-' + name) === 'true', states = [];
    if (el.checked || aria('checked')) states.push('checked');
    if (aria('selected')) states.push('selected');
    if (aria('pressed')) states.push('pressed');
    if (aria('expanded') || (el.tagName === 'SUMMARY' && el.parentElement?.open)) states.push('expanded');
    if (el.matches(':disabled') || aria('disabled')) states.push('disabled');
    if (el.readOnly && !['button', 'checkbox', 'radio'].includes(role)) states.push('read-only');
    return states;
  };

  // `rect` in the coordinates of its frame, `frame` of the page: {x, y, clip, scrolls}.
  const emit = (el, rect, frame, role, name, usable, rest = () => [null, [], []]) => {
    const left = Math.max(rect.left + frame.x, frame.clip.left), right = Math.min(rect.right + frame.x, frame.clip.right);
    const top = Math.max(rect.top + frame.y, frame.clip.top), bottom = Math.min(rect.bottom + frame.y, frame.clip.bottom);
    if (left >= right || top >= bottom) {
      if (rect.bottom + frame.y <= frame.clip.top && frame.scrolls) above++;
      else if (rect.top + frame.y >= frame.clip.bottom && frame.scrolls) below++;
      return;  // or it cannot be seen, however one scrolls
    }
    if (++here > most) return;
    const item = [role, (typeof name === 'function' ? name() : name).slice(0, CHARS), usable, ...rest()];
    refs.push({el, rect: el.nodeType === 3, item: item.slice(0, 2)});
    items.push(item);
  };
  let run = null;  // text that belongs together
  const flush = () => {
    if (run?.text.trim()) emit(run.node, run.rect, run.frame, run.role, run.text, run.usable);
    run = null;
  };
  const addText = (node, frame) => {
    const text = node.data;
    if (!text.trim()) { if (run) run.text += ' '; return; }
    const range = node.ownerDocument.createRange();
    range.selectNodeContents(node);
    const box = range.getBoundingClientRect();
    if (!box.width || !box.height) return;
    if (run && run.frame !== frame) flush();
    run ??= {text: '', node, rect: {left: box.left, right: box.right, top: box.top, bottom: box.bottom}, frame, role: frame.role, usable: frame.listens};
    if (run.cell && run.text.trim()) run.text += ' | ';
    run.cell = false;
    if (run.text.length < CHARS) run.text += text.slice(0, CHARS);
    for (const [side, best] of [['left', Math.min], ['top', Math.min], ['right', Math.max], ['bottom', Math.max]]) run.rect[side] = best(run.rect[side], box[side]);
    if (frame.listens) flush();
  };
  const children = (node, frame) => {
    for (const child of node.shadowRoot ? node.shadowRoot.childNodes : node.tagName === 'SLOT' && node.assignedNodes().length ? node.assignedNodes() : node.childNodes) {
      if (++looked > look) return;
      if (child.nodeType === 3 && !frame.silent) addText(child, frame);
      else if (child.nodeType === 1) visit(child, frame);
    }
  };
  const visit = (el, frame) => {
    const tag = el.tagName.toUpperCase();
    if (SKIPPED.has(tag) || el.getAttribute('aria-hidden') === 'true') return;
    if (tag === 'BR') { if (run) run.text += ' '; return; }
    const style = getComputedStyle(el);
    if (style.display === 'none' || (style.display !== 'contents' && !el.checkVisibility())) return;
    const role = roleOf(el), rect = el.getBoundingClientRect();
    if (tag === 'IFRAME' || tag === 'FRAME') return flush(), ofFrame(el, rect, frame);
    const box = rect.width && rect.height ? rect : el.labels?.[0]?.getBoundingClientRect() ?? rect;
    const listens = el.hasAttribute('data-listens') || el.hasAttribute('onclick') || el.hasAttribute('onmousedown') || frame.listens;
    const points = style.cursor === 'pointer' && !frame.points;
    if (LEAVES.has(role)) {
      flush();
      if (style.visibility === 'visible' && box.width && box.height) {
        const options = () => el.tagName === 'SELECT' ? [...el.options].slice(0, 200).map(option => option.label.slice(0, 200)) : [];
        emit(el, box, frame, role, () => nameOf(el, role), true, () => [valueOf(el, role), options(), statesOf(el, role)]);
      }
      return;
    }
    if (role === 'image') {
      flush();
      const name = nameOf(el, role);
      if ((name || listens || points) && rect.width && rect.height && style.visibility === 'visible') emit(el, rect, frame, role, name, listens || points);
      return;
    }
    const inline = style.display.startsWith('inline') || style.display === 'contents' || tag === 'TSPAN';
    const cell = tag === 'TD' || tag === 'TH';
    if (cell && run) run.cell = true; else if (!inline && !cell) flush();
    const clips = style.overflowX !== 'visible' && !inline && el !== document.scrollingElement && tag !== 'BODY' && tag !== 'HTML';
    const inner = {...frame, points: frame.points || points, listens: listens || points || frame.listens,
      silent: frame.silent || (tag === 'LABEL' && !!el.control && !listens), role: role === 'heading' ? 'heading' : frame.role};
    if (clips) {
      inner.clip = {left: Math.max(frame.clip.left, rect.left + frame.x), right: Math.min(frame.clip.right, rect.right + frame.x),
        top: Math.max(frame.clip.top, rect.top + frame.y), bottom: Math.min(frame.clip.bottom, rect.bottom + frame.y)};
      inner.scrolls = /auto|scroll/.test(style.overflowY);
    }
    if (style.visibility !== 'visible') inner.silent = true;
    const same = ['points', 'listens', 'silent', 'role', 'clip'].every(key => inner[key] === frame[key]);
    const before = here + above + below;
    children(el, same ? frame : inner);
    if (!inline && !cell || !same) flush();
    const own = el.hasAttribute('data-listens') || el.hasAttribute('onclick') || points || el.hasAttribute('tabindex');
    if (own && before === here + above + below && rect.width && rect.height && style.visibility === 'visible')
      emit(el, rect, frame, 'box', el.getAttribute('aria-label') || el.title || el.id || el.classList[0] || '', true);
  };
  const ofFrame = (el, rect, frame) => {
    let doc = null;
    try { doc = el.contentDocument; } catch {}
    const clip = {left: Math.max(frame.clip.left, rect.left + frame.x), right: Math.min(frame.clip.right, rect.right + frame.x),
      top: Math.max(frame.clip.top, rect.top + frame.y), bottom: Math.min(frame.clip.bottom, rect.bottom + frame.y)};
    if (!doc?.body) { if (rect.width && rect.height) emit(el, rect, frame, 'frame', 'of another origin, not shown', false); return; }
    children(doc.body, {...frame, x: frame.x + rect.left + el.clientLeft, y: frame.y + rect.top + el.clientTop, clip, scrolls: true});
    flush();
  };
  if (document.body) visit(document.body, {x: 0, y: 0, clip: {left: 0, top: 0, right: innerWidth, bottom: innerHeight}, scrolls: true, role: 'text', listens: false, points: false, silent: false});
  flush();
  return {title: document.title, address: location.pathname + location.search, items, above, below, left: Math.max(0, here - most), cut: looked > look};
}
