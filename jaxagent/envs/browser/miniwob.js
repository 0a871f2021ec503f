// What the package's own driver does when an episode begins. What the page shows beside its problem goes.
(seed => {
  core.EPISODE_MAX_TIME = 1e9;
  Math.seedrandom(seed);
  core.startEpisodeReal();
  const sheet = new CSSStyleSheet();
  sheet.replaceSync('#query { visibility: hidden } #reward-display, #click-canvas { display: none !important }');
  document.adoptedStyleSheets = [...document.adoptedStyleSheets, sheet];
  const asked = core.getUtterance();
  return asked.utterance ?? asked;
})(SEED)
