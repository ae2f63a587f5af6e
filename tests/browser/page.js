// What the tests ask of JupyterLab from inside its page. State comes from the notebook's model: cells that are far
// from the screen are not drawn, and prompts on the page lag behind.
window.house = {
  panels: {},

  async open(path) {
    const app = window.jupyterapp;
    const panel = await app.commands.execute('docmanager:open', { path, factory: 'Notebook' });
    this.panels[path] = panel;
    await panel.context.ready;
    await panel.revealed;
    await panel.sessionContext.ready;
    app.shell.activateById(panel.id);
  },

  // Without the question whether to save.
  async close(path) {
    const panel = this.panels[path];
    delete this.panels[path];
    if (panel.sessionContext.session) await panel.sessionContext.shutdown();
    panel.dispose();
  },

  kernel(path) {
    return this.panels[path].sessionContext.session?.kernel ?? null;
  },

  kernelStatus(path) {
    return this.kernel(path)?.status ?? 'none';
  },

  watchRestart(path) {
    const { sessionContext } = this.panels[path];
    this.restarted = new Promise(resolve => {
      let gone = false;
      const look = (_, status) => {
        gone ||= status === 'restarting';
        if (!gone || status !== 'idle') return;
        sessionContext.statusChanged.disconnect(look);
        resolve();
      };
      sessionContext.statusChanged.connect(look);
    });
  },

  // Pictures travel as their kind and length alone.
  state(path) {
    const brief = ([kind, value]) => [kind, kind.startsWith('image/') ? [value].flat().join('').length : [value].flat().join('')];
    const output = o => (o.data ? { ...o, data: Object.fromEntries(Object.entries(o.data).filter(([k]) => !k.endsWith('+json')).map(brief)), kinds: Object.keys(o.data) } : { ...o, text: [o.text ?? ''].flat().join('') });
    return Array.from(this.panels[path].content.model.cells).map(cell => {
      const { id, cell_type, source, execution_count, outputs } = cell.toJSON();
      return { id, type: cell_type, source: [source].flat().join(''), count: execution_count ?? null, outputs: (outputs ?? []).map(output) };
    });
  },

  // 'done', 'error' or 'dead' once the kernel rests, else null. That it rests is no proof of anything: between cells it
  // does, and answering a request on the side it says so in the middle of a cell.
  verdict(path) {
    const status = this.kernelStatus(path);
    if (['dead', 'autorestarting', 'none'].includes(status)) return 'dead';
    if (status !== 'idle') return null;
    const code = this.state(path).filter(cell => cell.type === 'code' && cell.source.trim());
    if (code.some(cell => cell.outputs.some(output => output.output_type === 'error'))) return 'error';
    return code.every(cell => cell.count !== null) ? 'done' : null;
  },

  setSource(path, id, source) {
    Array.from(this.panels[path].content.model.cells).find(cell => cell.id === id).sharedModel.setSource(source);
  },

  // What Python code prints in the notebook's kernel, without a cell.
  async ask(path, code) {
    for (;;) {
      let said = '';
      const future = this.kernel(path).requestExecute({ code, store_history: false, stop_on_error: false });
      future.onIOPub = message => {
        if (message.header.msg_type === 'stream') said += message.content.text;
        if (message.header.msg_type === 'error') said += message.content.traceback.join('\n');
      };
      const reply = await future.done;
      // For a moment after an error a kernel throws away whatever it is asked, together with the cells still to run.
      if (reply.content.status !== 'aborted') return said;
    }
  },

  cellWidget(path, id) {
    return this.panels[path].content.widgets.find(widget => widget.model.id === id);
  },

  async reveal(path, id) {
    const { content } = this.panels[path];
    content.activeCellIndex = content.widgets.findIndex(widget => widget.model.id === id);
    content.mode = 'command';
    await content.scrollToCell(content.activeCell, 'start');
  },

  // --- widgets ---

  area(path, id) {
    return this.cellWidget(path, id).node.querySelector('.jp-OutputArea');
  },

  widgetRoots(path, id) {
    const cell = Array.from(this.panels[path].content.model.cells).find(found => found.id === id);
    const data = cell.toJSON().outputs.map(output => output.data?.['application/vnd.jupyter.widget-view+json']);
    return data.filter(Boolean).map(view => view.model_id);
  },

  views(path, id) {
    // A slider over a list lacks the class that all others have.
    return this.area(path, id)?.querySelectorAll('.jupyter-widgets, .widget-slider, .widget-hslider').length ?? 0;
  },

  visible(node) {
    const { width, height } = node.getBoundingClientRect();
    return width > 0 && height > 0 && getComputedStyle(node).visibility !== 'hidden';
  },

  // Every control that a person could use now, in the order of the page; each is marked so that it can be found.
  controls(path, id) {
    const kinds = {
      slider: '.noUi-handle',
      dropdown: '.widget-dropdown select',
      list: 'select[size], select[multiple]',
      checkbox: 'input[type=checkbox]',
      radio: 'input[type=radio]',
      number: 'input[type=number]',
      text: 'input[type=text], textarea',
      button: 'button',
      tab: '.lm-TabBar-tab, .jupyter-widget-Collapse-header',
    };
    const selectors = Object.values(kinds).join(', ');
    const times = {};
    this.area(path, id).querySelectorAll('[data-house]').forEach(node => delete node.dataset.house);
    return Array.from(this.area(path, id).querySelectorAll(selectors))
      .filter(node => node.closest('.jupyter-widgets') && this.visible(node) && !node.disabled && !node.closest('[disabled]'))
      .map((node, place) => {
        const kind = Object.keys(kinds).find(name => node.matches(kinds[name]));
        const box = node.closest('.widget-inline-hbox, .widget-inline-vbox');
        const own = (node.closest('button, label, .lm-TabBar-tab')?.textContent ?? '').trim();
        const label = own || box?.querySelector('.widget-label')?.textContent.trim() || node.title || '';
        const same = `${kind} ${label}`;
        times[same] = (times[same] ?? 0) + 1;
        node.dataset.house = `${id}-${place}`;
        return {
          name: times[same] > 1 ? `${same} ${times[same]}` : same,
          kind,
          selector: `[data-house="${id}-${place}"]`,
          value: kind === 'slider' ? node.getAttribute('aria-valuenow') : kind === 'checkbox' || kind === 'radio' ? String(node.checked) : node.value ?? '',
          readout: kind === 'slider' ? box?.querySelector('.widget-readout')?.textContent.trim() ?? '' : '',
          options: node.tagName === 'SELECT' ? Array.from(node.options, option => option.label) : [],
          chosen: node.tagName === 'SELECT' ? Array.from(node.selectedOptions, option => option.label) : [],
          active: node.classList.contains('mod-active') || node.classList.contains('lm-mod-current') || node.checked === true,
        };
      });
  },

  // A fingerprint of every picture that is on the page in this cell's output; null while one is being replaced.
  async pictures(path, id) {
    const prints = [];
    for (const image of this.area(path, id).querySelectorAll('img')) {
      if (!image.complete) return null;
      if (!this.visible(image)) continue;
      const canvas = document.createElement('canvas');
      try {
        await image.decode();
        canvas.width = image.naturalWidth;
        canvas.height = image.naturalHeight;
        canvas.getContext('2d').drawImage(image, 0, 0);
      } catch {
        return null;
      }
      if (!image.isConnected) return null;
      const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
      if (!pixels.some(Boolean)) return null; // a new source that is not there yet leaves the canvas as it was
      const digest = await crypto.subtle.digest('SHA-256', pixels);
      prints.push(Array.from(new Uint8Array(digest).slice(0, 8), byte => byte.toString(16).padStart(2, '0')).join(''));
    }
    return prints;
  },

  async picturesChanged(path, id, before) {
    const now = await this.pictures(path, id);
    return now?.length > 0 && JSON.stringify(now) !== JSON.stringify(before);
  },

  text(path, id) {
    return this.area(path, id).innerText;
  },

  // Milliseconds from the next key press to the painting of the picture that it leads to.
  watchNextPicture(path, id) {
    const area = this.area(path, id);
    const sources = () => Array.from(area.querySelectorAll('img'), image => image.src).join();
    const before = sources();
    let pressed = null;
    window.addEventListener('keydown', event => (pressed = event.timeStamp), { capture: true, once: true });
    this.nextPicture = new Promise(resolve => {
      const observer = new MutationObserver(async () => {
        if (pressed === null || sources() === before) return;
        observer.disconnect();
        await Promise.allSettled(Array.from(area.querySelectorAll('img'), image => image.decode()));
        // A frame's callbacks run before it is painted, a message posted there arrives after.
        requestAnimationFrame(() => {
          const channel = new MessageChannel();
          channel.port1.onmessage = () => resolve(performance.now() - pressed);
          channel.port2.postMessage(null);
        });
      });
      observer.observe(area, { subtree: true, childList: true, attributes: true, attributeFilter: ['src'] });
    });
  },
};
