// A chart as a PNG. Not by Plotly's own way, which loads an image from a blob: our policy allows none.
const WIDTH = 1200;
const HEIGHT = 500;
const SCALE = 2;

export async function saveImage(plot, name) {
  const svg = await Plotly.toImage(plot, { format: "svg", width: WIDTH, height: HEIGHT, imageDataOnly: true });
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
