// Times of the server's pages are in UTC; their titles become those of the reader's own clock.
for (const time of document.querySelectorAll("time[datetime]")) {
  const at = new Date(time.dateTime);
  if (!Number.isNaN(at.getTime())) time.title = at.toLocaleString();
}
