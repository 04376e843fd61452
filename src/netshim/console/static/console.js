// Live parts of the console: times in the viewer's zone, copying, and the live tail.
// Without this file, pages show the same facts, and times in UTC.
"use strict";

const pad = (value, width = 2) => String(value).padStart(width, "0");

function showLocalTimes(root) {
  for (const element of root.querySelectorAll("time[datetime]")) {
    const moment = new Date(element.dateTime);
    if (Number.isNaN(moment.getTime())) continue;
    const day = `${moment.getFullYear()}-${pad(moment.getMonth() + 1)}-${pad(moment.getDate())}`;
    const time = `${pad(moment.getHours())}:${pad(moment.getMinutes())}:${pad(moment.getSeconds())}`;
    const milliseconds = element.classList.contains("short") ? "" : `.${pad(moment.getMilliseconds(), 3)}`;
    element.textContent = `${day} ${time}${milliseconds}`;
  }
}

function addCopyButtons() {
  if (!navigator.clipboard) return;
  for (const button of document.querySelectorAll("button.copy")) {
    button.hidden = false;
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).textContent);
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
  }
}

function followLive(table) {
  const body = table.tBodies[0];
  const most = Number(table.dataset.most);
  const state = document.getElementById("live-state");
  const pause = document.getElementById("pause");
  const waiting = [];
  let arrived = 0;
  let leftOut = 0;
  let isPaused = false;

  function report(text) {
    const others = leftOut ? `, ${leftOut.toLocaleString()} left out` : "";
    state.textContent = `${text}: ${arrived.toLocaleString()} arrived${others}`;
  }

  function add(html) {
    const template = document.createElement("template");
    template.innerHTML = html; // escaped by the server
    const rows = [...template.content.querySelectorAll("tr")];
    showLocalTimes(template.content);
    for (const row of rows) {
      row.classList.add("new");
      body.prepend(row);
    }
    while (body.rows.length > most) body.deleteRow(-1);
  }

  function release() {
    for (const html of waiting.splice(0)) add(html);
  }

  pause.hidden = false;
  pause.addEventListener("click", () => {
    isPaused = !isPaused;
    pause.setAttribute("aria-pressed", String(isPaused));
    if (!isPaused) release();
    report(isPaused ? "Paused" : "Following");
  });

  const source = new EventSource(table.dataset.events);
  source.addEventListener("open", () => report("Following"));
  source.addEventListener("error", () => { state.textContent = "The connection is lost; trying again"; });
  source.addEventListener("rows", (event) => {
    const { html, skipped } = JSON.parse(event.data);
    const template = document.createElement("template");
    template.innerHTML = html;
    arrived += template.content.querySelectorAll("tr").length + skipped;
    leftOut += skipped;
    waiting.push(html);
    // A pause keeps the newest events only: each has at most as many rows as the page.
    while (waiting.length > 20) { waiting.shift(); }
    if (!isPaused) release();
    report(isPaused ? "Paused" : "Following");
  });
  source.addEventListener("problem", (event) => {
    source.close();
    state.textContent = JSON.parse(event.data).text;
  });
}

showLocalTimes(document);
addCopyButtons();
const live = document.getElementById("live");
if (live) followLive(live);
