import { Component, type ComponentChildren } from "preact";
import { useEffect, useRef } from "preact/hooks";

/** The links of the header: key, label and address. */
export type Link = readonly [string, string, string];

/** The frame of every page: header with links and chips, then the page, which has the focus when it is new. */
export function Shell({ path, title, links, current, chips, children }: { path: string; title: string; links: readonly Link[]; current: string; chips?: ComponentChildren; children: ComponentChildren }) {
  const main = useRef<HTMLElement>(null);
  const before = useRef(path);
  useEffect(() => {
    document.title = `${title} · insitu`;
  }, [title]);
  useEffect(() => {
    if (before.current === path) return;
    const samePage = before.current.split("/").slice(0, 3).join("/") === path.split("/").slice(0, 3).join("/");
    before.current = path;
    // A new page: readers start at its top. A slider that changes the address keeps its focus.
    if (samePage && main.current?.contains(document.activeElement) && document.activeElement !== main.current) return;
    main.current?.focus({ preventScroll: true });
    scrollTo(0, 0);
  }, [path]);
  return (
    <>
      <header>
        <a class="logo" href="#/">
          insitu
        </a>
        <nav aria-label="Pages">
          {links.map(([key, label, to]) => (
            <a key={key} href={to} {...(current === key ? { "aria-current": "page" as const } : {})}>
              {label}
            </a>
          ))}
        </nav>
        <span class="grow" />
        {chips}
      </header>
      <main id="main" ref={main} tabIndex={-1}>
        <Guard path={path}>{children}</Guard>
      </main>
    </>
  );
}

/** An error in a page stays in the page, with its words. */
class Guard extends Component<{ path: string; children: ComponentChildren }, { error: Error | null }> {
  override state = { error: null as Error | null };

  override componentDidUpdate(before: { path: string }): void {
    if (before.path !== this.props.path && this.state.error) this.setState({ error: null });
  }

  override componentDidCatch(error: unknown): void {
    this.setState({ error: error instanceof Error ? error : new Error(String(error)) });
  }

  override render() {
    const { error } = this.state;
    if (!error) return this.props.children;
    return (
      <section role="alert">
        <p>
          <b>This page cannot show what it was given.</b> {error.message}
        </p>
        <p class="fix">Reload it. If it fails again, report the address and this sentence.</p>
      </section>
    );
  }
}
