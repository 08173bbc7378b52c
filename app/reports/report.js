"use strict";
// Draws every figure, then says in the document how many there are: what waits for the page can look there.
(async () => {
  const figures = JSON.parse(document.getElementById("figures").textContent);
  let drawn = 0;
  for (const [name, figure] of Object.entries(figures)) {
    const place = document.getElementById("figure-" + name);
    await Plotly.newPlot(place, figure.data, figure.layout, { responsive: true, displaylogo: false });
    drawn += 1;
  }
  document.body.dataset.drawn = String(drawn);
})();
