// Keeps a task's page up to date: what the server sends takes the place of the elements with the same ids.
const live = document.getElementById("live");
const link = document.getElementById("live-link");
const news = document.getElementById("live-news");
// In milliseconds. The server has the browser try again after two seconds.
const LOST_AFTER = 4000;
let source, again, hiding, lost, ahead = 0, wait = 1000, version = live.dataset.version, told = said(document), over = "";

function said(place) {
  return [...place.querySelectorAll("[data-news]")].map((each) => each.dataset.news).join(". ");
}

function say(text) {
  if (link.textContent !== text) link.textContent = text;
}

// Times of the server, by its own clock.
function setClock() {
  const now = document.querySelector("[data-now]");
  if (now) ahead = Number(now.dataset.now) - Date.now() / 1000;
}

function tick() {
  for (const each of document.querySelectorAll("[data-since]")) {
    const seconds = Math.max(0, Math.round(Date.now() / 1000 + ahead - Number(each.dataset.since)));
    const text = seconds < 120 ? `${seconds} s` : seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${Math.round(seconds / 3600)} h`;
    if (each.textContent !== text) each.textContent = text;
  }
}

function show(html) {
  const made = document.createElement("template");
  made.innerHTML = html;
  const words = said(made.content);
  for (const fresh of [...made.content.children]) {
    const old = fresh.id && document.getElementById(fresh.id);
    if (!old || old.isEqualNode(fresh)) continue;
    // Who reads with the keyboard stays where they are, and tables stay scrolled.
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const place = focused && (focused.id || focused.getAttribute("href"));
    const scrolled = [...old.querySelectorAll(".scroll[id]")].map((each) => [each.id, each.scrollLeft]);
    const opened = [...old.querySelectorAll("details[open][id]")].map((each) => each.id);
    old.replaceWith(fresh);
    for (const id of opened) {
      const each = document.getElementById(id);
      if (each) each.open = true;
    }
    for (const [id, left] of scrolled) {
      const each = document.getElementById(id);
      if (each) each.scrollLeft = left;
    }
    if (place) {
      const same = [...fresh.querySelectorAll("[id], a[href]")].find((each) => (each.id || each.getAttribute("href")) === place);
      (same || live).focus({ preventScroll: true });
    }
  }
  setClock();
  tick();
  if (words !== told) news.textContent = told = words;
}

function open() {
  clearTimeout(again);
  if (source || over || document.hidden) return;
  source = new EventSource(`${live.dataset.events}?after=${version}`);
  source.addEventListener("open", () => {
    wait = 1000;
    lost = clearTimeout(lost);
    say("Live: news comes by itself.");
  });
  source.addEventListener("rounds", (event) => {
    version = event.lastEventId;
    show(event.data);
  });
  source.addEventListener("over", (event) => {
    over = event.data;
    close();
    say(`No longer live: ${over}. Open the page again to log in.`);
  });
  source.addEventListener("error", () => {
    // A stream that a proxy cuts off, or the server ends after a while, goes on within a few seconds.
    lost ??= setTimeout(() => say("The connection is lost; trying again. What you see may be old."), LOST_AFTER);
    // A browser tries by itself where a connection broke, and not where the server refused one.
    if (source && source.readyState === EventSource.CLOSED) {
      close();
      again = setTimeout(open, wait);
      wait = Math.min(2 * wait, 60000);
    }
  });
}

function close() {
  lost = clearTimeout(lost);
  if (source) source.close();
  source = undefined;
}

// A hidden page holds no connection: browsers have few for each server.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (!document.hidden) open();
  else hiding = setTimeout(() => { close(); say("Not live while the page is hidden."); }, 5000);
});
window.addEventListener("pagehide", close);
window.addEventListener("pageshow", open);
setClock();
setInterval(tick, 1000);
open();
