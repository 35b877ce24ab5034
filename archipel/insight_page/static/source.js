/* Where the page's data are: in the page itself, or at an address of a server, which makes them when they are asked for. */

/** What the server says of a page of its own: addresses, names. */
const served = document.getElementById("view").dataset;

/** An error that is said to the reader, and is none of the page. */
class Told extends Error {}

/** What is at an address as JSON; `wait` is told of each time that it has to be asked for again. */
async function ask(address, wait = () => {}) {
  for (let tries = 0; ; tries += 1) {
    const answer = await fetch(address, { redirect: "manual" });
    if (answer.type === "opaqueredirect") throw new Told("Your session has ended: open the page again to log in.");
    if (answer.status === 200) return answer.json();
    if (answer.status === 422) throw new Told((await answer.json()).problem);
    const later = answer.status === 202 || answer.status === 429 || answer.status === 503;
    if (!later || tries > 600) throw new Told(`The server does not give this (status ${answer.status}): open the page again.`);
    wait(tries);
    await new Promise((resolve) => setTimeout(resolve, answer.status === 202 ? Math.min(2000, 300 + 100 * tries) : 2000));
  }
}

async function readPage() {
  const inside = document.getElementById("data");
  if (inside) return JSON.parse(inside.textContent);
  const told = await ask(served.page, (tries) => {
    if (!tries) document.getElementById("view").textContent = "The server reads the model; this takes some seconds the first time.";
  });
  // The server reads a model once, whatever it is called.
  JSON.parse(served.names).forEach((name, at) => told.subjects[at] && (told.subjects[at].name = name));
  return told;
}

const page = await readPage();

/** [{label, from}]: versions of the weights, of which an address has the histograms. */
const versions = JSON.parse(served.versions ?? "[]");
