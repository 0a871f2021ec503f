// Values under the pointer. The rest is complete without it.
const tip = document.getElementById("tip");
function show(event, text) {
  tip.textContent = text;
  tip.style.display = "block";
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.min(event.clientX + 14, innerWidth - box.width - 8) + "px";
  tip.style.top = (event.clientY + box.height + 24 > innerHeight ? event.clientY - box.height - 12 : event.clientY + 16) + "px";
}
const hide = () => { tip.style.display = "none"; };
const format = (v) => (Math.abs(v) >= 1000 ? Math.round(v).toLocaleString() : Number(v.toPrecision(4)).toString());

for (const figure of document.querySelectorAll(".chart")) {
  const data = JSON.parse(figure.dataset.series);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const place = data.log ? Math.log : (x) => x;
  const [left, right, top, bottom] = data.frame, [low, high] = data.x.map(place);
  const xs = [...new Set(data.series.flatMap(([, points]) => points.map((p) => p[0])))];
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const wanted = low + ((at - left) / (right - left)) * (high - low);
    const x = xs.reduce((a, b) => (Math.abs(place(b) - wanted) < Math.abs(place(a) - wanted) ? b : a));
    const pixel = left + ((place(x) - low) / (high - low || 1)) * (right - left);
    cursor.setAttribute("d", `M${pixel},${top}V${bottom}`);
    const lines = data.series.map(([name, points]) => [name, points.find((p) => p[0] === x)]).filter(([, p]) => p);
    show(event, [`${data.name} ${x}`, ...lines.map(([name, p]) => `${name}  ${format(p[1])}`)].join("\n"));
  });
  svg.addEventListener("pointerleave", () => { cursor.setAttribute("d", ""); hide(); });
}
