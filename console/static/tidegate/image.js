// A chart as a PNG. Not by Plotly's own way, which loads an image from a blob: our policy allows none.
const WIDTH = 1200;
const HEIGHT = 500;
const SCALE = 2;
const TITLE = 36; // pixels

// Elsewhere nobody sees beside which heading it stood.
export async function saveImage(plot, name, title) {
  const { data, layout } = plot;
  const margin = { ...layout.margin, t: layout.margin.t + TITLE };
  const titled = { data, layout: { ...layout, margin, title: { text: title, x: 0.01, font: { size: 16 } } } };
  const svg = await Plotly.toImage(titled, { format: "svg", width: WIDTH, height: HEIGHT, imageDataOnly: true });
  const image = new Image(WIDTH, HEIGHT);
  image.src = `data:image/svg+xml,${encodeURIComponent(svg)}`;
  await image.decode();
  const canvas = document.createElement("canvas");
  canvas.width = WIDTH * SCALE;
  canvas.height = HEIGHT * SCALE;
  const context = canvas.getContext("2d");
  context.fillStyle = getComputedStyle(plot.closest(".panel") ?? document.body).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  const link = document.createElement("a");
  link.href = canvas.toDataURL("image/png");
  link.download = `${name}.png`;
  link.click();
}
