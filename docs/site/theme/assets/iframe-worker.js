/* A browser starts no worker for a page that was opened from a file. Here a frame runs the script of
   the search's worker then, under the names that the theme asks for. Elsewhere nothing is changed. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.before = []; // messages that came before the script was there
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inner = frame.contentWindow;
      const added = (source) => new Promise((resolve, reject) => {
        const script = inner.document.createElement("script");
        script.onload = resolve;
        script.onerror = () => reject(new Error(`${source} is missing`));
        script.src = source;
        inner.document.head.append(script);
      });
      inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inner.importScripts = async (...sources) => {
        for (const source of sources) await added(new URL(source, url));
      };
      this.take = (data) => inner.dispatchEvent(new MessageEvent("message", { data }));
      added(new URL(url, location.href)).then(() => {
        for (const data of this.before.splice(0)) this.take(data);
        this.before = null;
      });
    }
    postMessage(data) {
      if (this.before) this.before.push(data);
      else this.take(data);
    }
    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
