// Times of the server's pages are in UTC; their titles become those of the reader's own clock.
for (const time of document.querySelectorAll("time[datetime]")) {
  const at = new Date(time.dateTime);
  if (!Number.isNaN(at.getTime())) time.title = at.toLocaleString();
}

// A form with a file says how much of it has been sent. Without a script the browser sends it all the same.
const upload = document.querySelector("form[data-most]");
upload?.addEventListener("submit", (event) => {
  event.preventDefault();
  const button = upload.querySelector("button");
  const said = upload.querySelector(".progress");
  const tell = (text) => {
    said.textContent = text;
    button.disabled = false;
  };
  const most = Number(upload.dataset.most);
  if (upload.elements.bundle.files[0]?.size > most) {
    tell(`The file is larger than the ${most} bytes that the server takes.`);
    return;
  }
  button.disabled = true;
  const sending = new XMLHttpRequest();
  const bar = document.createElement("progress");
  bar.className = "bar";
  bar.setAttribute("aria-label", "Sent");
  let last = "";
  sending.upload.addEventListener("progress", ({ loaded, total }) => {
    bar.max = total;
    bar.value = loaded;
    // Words for screen readers, in steps that leave time to read them out.
    const share = Math.floor((10 * loaded) / total) * 10;
    const text = share < 100 ? `${share} % sent` : "All is sent; the server checks it";
    if (text !== last) said.replaceChildren(bar, ` ${text}`);
    last = text;
  });
  sending.addEventListener("error", () => tell("The connection was lost before the server answered; try again."));
  sending.addEventListener("load", () => {
    if (sending.status < 300 && sending.responseURL !== location.href) {
      location.assign(sending.responseURL);
      return;
    }
    const answer = new DOMParser().parseFromString(sending.responseText, "text/html");
    const told = answer.querySelector("[role=alert]") ?? answer.querySelector("main p");
    tell(told?.textContent ?? `The server answered ${sending.status}.`);
  });
  sending.open("POST", location.pathname);
  sending.send(new FormData(upload));
});
