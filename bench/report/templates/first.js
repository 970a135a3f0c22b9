// Runs before the tables are laid out: what needs scripts shows, and the leaderboard once it is
// ready or something failed.
const root = document.documentElement.classList; root.add("on");
addEventListener("error", () => root.add("ready"));
