/** Where the focus goes when what has it cannot be used any more; browsers drop it, and the keyboard is lost. */

/** Disable or enable; what had the focus, itself or in it, hands it to `next`. */
export function setDisabled(
  element: HTMLButtonElement | HTMLFieldSetElement,
  disabled: boolean,
  next: HTMLElement,
): void {
  const focused = disabled && !element.disabled && element.contains(document.activeElement);
  element.disabled = disabled;
  if (focused) next.focus({ preventScroll: true });
}
