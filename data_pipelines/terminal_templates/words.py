"""Names that tasks are made of. Short English nouns; none is a command or a word of the instructions."""

_WORDS = """
acorn agate alder alley amber anchor angle ankle apple apron arbor arrow ash aspen atlas attic autumn axle badge
bagel bakery balcony bamboo banner barley barn basil basket beacon beam bean bear beaver bell bench berry birch
bishop blanket blossom boat bonfire border bottle boulder bowl branch brass bread brick bridge bronze brook
broom bucket bugle bundle butter button cabin cable cactus camel camera candle canoe canvas canyon carbon cargo
carpet carrot castle cattle cavern cedar cello chalk chapel cherry chimney cider cinder circle citrus clay cliff
clover coast cobalt cocoa comet copper coral cotton crane crater creek cricket crystal cup curtain cypress daisy
dawn delta denim desert diamond dolphin donkey dragon drum dune eagle echo elbow elm ember engine falcon farm
feather fennel ferry fiddle fig finch flame flint flute forest fossil fountain fox frost galaxy garden garlic
garnet gate gazelle ginger glacier glove goat gold goose granite grape gravel grove guitar hammer harbor harp
hawk hazel heron hickory hill honey horizon hornet iris iron island ivory ivy jacket jade jaguar jasmine jelly
jewel jungle juniper kayak kernel kettle kite kitten koala ladder lagoon lake lamp lantern larch laurel lava
lemon lentil lilac lily lime linen lion lizard llama lobster locket lotus magnet mango maple marble marsh meadow
melon meteor mint mirror mitten moon mosaic moss mountain mulberry mustard napkin needle nickel north nutmeg oak
oasis oat ocean olive onion opal orange orbit orchid otter owl oyster paddle palm panda panther paper parrot
pasture peach pear pebble pecan pelican pencil pepper piano pigeon pillow pine planet plum pocket pond poplar
poppy prairie prism puffin pumpkin quail quarry quartz quill rabbit raccoon radish raft rain raven reed ribbon
ridge river robin rocket rose ruby saddle saffron sage sail salmon satin saturn shadow shell silver sparrow
spruce squash stone storm sugar
"""
_PEOPLE = "alice bob carol dave erin frank grace heidi ivan judy mallory nina oscar peggy rupert sybil trent victor"
_CITIES = "accra berlin cairo dublin geneva hanoi lima lisbon madrid nairobi oslo paris quito riga seoul tokyo vienna"
_SERVICES = "auth billing cache gateway ingest mailer orders parser proxy queue search storage"

WORDS = tuple(_WORDS.split())  # 300 of them
PEOPLE = tuple(_PEOPLE.split())
CITIES = tuple(_CITIES.split())
SERVICES = tuple(_SERVICES.split())
