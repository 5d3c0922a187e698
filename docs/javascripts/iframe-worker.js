// Browsers refuse web workers on file:// pages. There, the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.deliver(data));
      });
      window.__worker = this;
      const bridge =
        "const owner = parent.__worker;" +
        "self.postMessage = (data) => owner.dispatchEvent(new parent.MessageEvent('message', { data }));";
      this.frame.srcdoc = `<script>${bridge}<\/script><script src="${url}"><\/script>`;
      document.body.appendChild(this.frame);
    }
    postMessage(data) {
      if (this.ready) this.deliver(data);
      else this.waiting.push(data);
    }
    deliver(data) {
      const inner = this.frame.contentWindow;
      inner.dispatchEvent(new inner.MessageEvent("message", { data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
