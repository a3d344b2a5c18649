// SPDX-License-Identifier: Apache-2.0
// Browsers refuse to start a worker from a file:// page. Run the search worker in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const scope = frame.contentWindow;
      scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope = new Promise((loaded, failed) => {
        const script = scope.document.createElement("script");
        script.src = url;
        script.onload = () => loaded(scope);
        script.onerror = failed;
        scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.scope.then((scope) => scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}
