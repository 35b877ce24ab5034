/**
 * From strokes to the 28 x 28 picture that the network knows: ink scaled into 20 x 20 pixels, its centre of mass in the
 * middle, as the bundled digits were made (LeCun et al. 1998, section III.A). Plain arithmetic, so that a drawing gives
 * the same picture in every browser and at every screen resolution.
 */

export interface Point {
  x: number;
  y: number;
}

/** One touch of the pen, in units of the pad's width. A tap is a stroke of one point. */
export type Stroke = Point[];

export const SIDE = 28;
const BOX = 20;
const CENTRE = SIDE / 2;
/** Half the width of the pen in pixels: about the ink of the bundled digits. */
const PEN = 1.25;
/** A drawing smaller than this part of the pad is not blown up any further: a dot stays a dot. */
const SMALLEST = 0.15;

interface Segment {
  from: Point;
  to: Point;
}

/** The picture of the strokes, bytes in row-major order (0 the paper, 255 the ink); undefined where nothing is drawn. */
export function rasterize(strokes: readonly Stroke[]): Uint8Array | undefined {
  const points = strokes.flat();
  if (points.length === 0) return undefined;
  const left = Math.min(...points.map((p) => p.x));
  const top = Math.min(...points.map((p) => p.y));
  const width = Math.max(...points.map((p) => p.x)) - left;
  const height = Math.max(...points.map((p) => p.y)) - top;
  const scale = (BOX - 2 * PEN) / Math.max(width, height, SMALLEST);
  const place = (dx: number, dy: number): Segment[] =>
    segments(strokes, (p) => ({ x: (p.x - left - width / 2) * scale + dx, y: (p.y - top - height / 2) * scale + dy }));
  const middle = draw(place(CENTRE, CENTRE));
  const mass = centreOfMass(middle);
  const ink = draw(place(CENTRE + CENTRE - mass.x, CENTRE + CENTRE - mass.y));
  return Uint8Array.from(ink, (value) => Math.round(255 * value));
}

function segments(strokes: readonly Stroke[], move: (point: Point) => Point): Segment[] {
  return strokes.flatMap((stroke) => {
    const moved = stroke.map(move);
    const first = moved[0];
    if (first === undefined) return [];
    if (moved.length === 1) return [{ from: first, to: first }];
    return moved.slice(1).map((to, index) => ({ from: moved[index] ?? first, to }));
  });
}

/** Ink in 0..1: full within the pen's radius, and fading over one pixel at its edge. */
function draw(lines: readonly Segment[]): Float32Array {
  const ink = new Float32Array(SIDE * SIDE);
  for (const line of lines) {
    const reach = PEN + 1;
    const x0 = Math.max(0, Math.floor(Math.min(line.from.x, line.to.x) - reach));
    const x1 = Math.min(SIDE - 1, Math.ceil(Math.max(line.from.x, line.to.x) + reach));
    const y0 = Math.max(0, Math.floor(Math.min(line.from.y, line.to.y) - reach));
    const y1 = Math.min(SIDE - 1, Math.ceil(Math.max(line.from.y, line.to.y) + reach));
    for (let row = y0; row <= y1; row += 1) {
      for (let column = x0; column <= x1; column += 1) {
        const distance = distanceTo(line, column + 0.5, row + 0.5);
        const value = Math.min(1, Math.max(0, PEN + 0.5 - distance));
        const at = row * SIDE + column;
        ink[at] = Math.max(ink[at] ?? 0, value);
      }
    }
  }
  return ink;
}

function distanceTo({ from, to }: Segment, x: number, y: number): number {
  const dx = to.x - from.x;
  const dy = to.y - from.y;
  const squared = dx * dx + dy * dy;
  const along = squared === 0 ? 0 : Math.min(1, Math.max(0, ((x - from.x) * dx + (y - from.y) * dy) / squared));
  return Math.hypot(x - from.x - along * dx, y - from.y - along * dy);
}

function centreOfMass(ink: Float32Array): Point {
  let sum = 0;
  let x = 0;
  let y = 0;
  ink.forEach((value, at) => {
    sum += value;
    x += value * ((at % SIDE) + 0.5);
    y += value * (Math.floor(at / SIDE) + 0.5);
  });
  return sum === 0 ? { x: CENTRE, y: CENTRE } : { x: x / sum, y: y / sum };
}
