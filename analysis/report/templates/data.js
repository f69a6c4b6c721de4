// Data of the page: the texts of points, the HTML of folded parts, in which the templates have escaped all texts, and in
// a report columns, runs and configurations. Other text of records is only ever set as the text of elements, never as HTML.
const packed = Uint8Array.from(atob(document.getElementById("data").textContent), (one) => one.charCodeAt(0));
const page = await new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
