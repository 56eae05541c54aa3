// Wide tables scroll by the keyboard, too; the theme wraps them once the page is there.
const reach = () => {
  for (const wide of document.querySelectorAll(".md-typeset__scrollwrap")) wide.tabIndex = 0;
};
new MutationObserver(reach).observe(document.body, { childList: true, subtree: true });
reach();
