const chips = [...document.querySelectorAll(".chip")];
const cases = [...document.querySelectorAll(".case")];
const search = document.getElementById("search");
const level = document.getElementById("level");
const texts = new Map(cases.map((one) => [
  one,
  [one.querySelector("summary"), one.querySelector(".says"), one.querySelector(".rules")]
    .map((part) => part.textContent).join(" ").toLowerCase(),
]));
function show() {
  const chosen = new Set(chips.filter((chip) => chip.classList.contains("on")).map((chip) => chip.dataset.verdict));
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  for (const one of cases) {
    const fits = chosen.has(one.dataset.verdict) && (!level.value || one.dataset.level === level.value)
      && words.every((word) => texts.get(one).includes(word));
    one.hidden = !fits;
    shown += fits;
  }
  for (const section of document.querySelectorAll("section:not(.rest)")) {
    section.hidden = ![...section.querySelectorAll(".case")].some((one) => !one.hidden);
  }
  document.getElementById("shown").textContent = shown + " of " + cases.length + " cases";
  document.getElementById("none").hidden = shown > 0;
}
for (const chip of chips) {
  chip.addEventListener("click", () => { chip.classList.toggle("on"); show(); });
}
search.addEventListener("input", show);
level.addEventListener("change", show);
document.getElementById("open").addEventListener("click", () => {
  const shown = cases.filter((one) => !one.hidden).slice(0, 100);
  const open = shown.some((one) => !one.open);
  for (const one of shown) { one.open = open; }
});
if (location.hash.startsWith("#failed")) {
  for (const chip of chips) { chip.classList.toggle("on", ["fail", "linux"].includes(chip.dataset.verdict)); }
}
show();
