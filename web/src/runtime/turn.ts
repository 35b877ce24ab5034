/** Taking turns: ONNX Runtime Web runs one thing at a time, and its promises do not always wait for that. */

/** Runs what it is given one after the other, in the order of the calls. */
export class Turns {
  private last: Promise<unknown> = Promise.resolve();

  take<T>(work: () => Promise<T>): Promise<T> {
    const mine = this.last.then(work);
    // A failure is its caller's, not the next one's.
    this.last = mine.catch(() => undefined);
    return mine;
  }
}

/** Let other tasks run: messages, input, painting. A promise alone would not, and a timer would wait for 4 ms. */
export function breathe(): Promise<void> {
  return new Promise((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
}
