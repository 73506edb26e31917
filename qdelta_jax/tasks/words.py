"""Keys of needles: an adjective and a noun, as in "calm-otter", from two short lists."""

import numpy as np

__all__ = ["ADJECTIVES", "NOUNS", "word_keys"]

_ADJECTIVES = """
able agile amber ample ancient arctic autumn bare blank bold brave brief bright brisk broad bronze calm careful
cheap cheerful chilly civil clean clear clever close cold common cool copper coral cosy crisp curious curly daily
damp dark dear deep dense distant double dry dusty eager early easy elder empty even exact fair faithful famous
fancy far fast fine firm first flat fluent fond formal free fresh friendly frosty full gentle giant glad golden
good grand grateful great green happy hardy hasty heavy hidden high hollow honest huge humble icy idle inner ivory
jolly keen kind large late lazy light lively local lone long loose loud lucky main major mellow mild modern
modest narrow native neat new nimble noble noisy north odd old open orange outer oval pale patient plain polite
precise pretty prime proud public pure purple quick quiet rapid rare ready real regal rich right ripe robust rosy
rough round royal rural rustic safe salty scarlet secret serene sharp shiny short shy silent silver simple sleepy
slim slow small smart smooth snowy sober soft solar solid sound south spare steady steep still stony strange
strict strong sturdy subtle sudden sunny sweet swift tall tame tender thick thin tidy tiny tough true upper useful
usual vague vast vivid warm wary wet white whole wide wild windy wise witty wooden woven young zealous
"""

_NOUNS = """
acorn actor address alley almond anchor answer antler apple apron arch armour arrow artist atlas aunt autumn avenue
badge bagpipe baker ballad balloon bamboo banana banjo barley barn barrel basin basket beach beacon bead beam bean
bear beaver bed beech beetle bell bench berry bicycle birch bird biscuit blanket blossom boat book boot border
bottle boulder bowl box bracelet branch bread breeze brick bridge brook broom brother brush bucket buffalo builder
butter button cabin cable cactus cake calendar camel camera camp canal candle canoe canvas canyon captain caravan
card carpet carrot cart castle cat cave cedar cellar chair chalk chapel chapter cheese cherry chess chimney church
cinema circle circus city clay cliff clock cloth cloud clover coach coast coat cobweb coffee coin collar comet
compass concert corner cottage cotton cousin cradle crane crayon creek cricket crown cup curtain cushion daisy
dancer deer desert desk diamond diary dinner dolphin donkey door dragon drawer dream dress drum duck eagle
earth editor elbow elephant elm engine envelope evening fabric factory falcon farm farmer feather fence fern
ferry fiddle field finger fire fish flag flame flute fog forest fork fountain fox frame friend frog fruit garden
garlic gate ghost giraffe glacier glass glove goat goose grape grass guitar hammer harbour harp hat hawk hazel
hedge helmet heron hill honey hood horse hotel house island jacket jar jewel journal jungle kettle key kitchen
kite kitten ladder lake lamp lantern leaf lemon letter library lily lion lizard lobster lock magnet maple marble
market mask meadow melon mill mirror mitten monkey moon morning moss mountain mouse museum napkin nest
notebook novel oak oasis ocean office olive onion orchard orchid otter oven owl paddle paint palace panda paper
parade park parrot path peach pearl pebble pelican pencil penguin pepper piano picture pigeon pillow pilot pine
planet plate plum pocket poem pond poplar portrait potato prairie puzzle quarry quilt rabbit radio raft railway
rain raven ribbon rice ring river road robin rocket roof root rose ruler saddle sail salmon sandal scarf school
seal season shadow shell shelf ship shoe shore signal singer sister sky sled snail soup sparrow spider spoon
spring squirrel stable star statue stone storm stove stream street summer sunset swan table tailor tea temple
tent theatre thistle thunder tiger toast tower town train tree trumpet tulip tunnel turtle uncle valley vase
velvet village violin wagon walnut walrus water waterfall wave whale wheat wheel whistle willow window winter
wolf wood wool writer yard zebra
"""

ADJECTIVES = tuple(_ADJECTIVES.split())
NOUNS = tuple(_NOUNS.split())


def word_keys(rng: np.random.Generator, count: int) -> list[str]:
    """`count` different keys "adjective-noun", each pair of words equally likely.

    >>> word_keys(np.random.default_rng(0), 2)
    ['subtle-paper', 'ready-avenue']
    """
    numbers = rng.choice(len(ADJECTIVES) * len(NOUNS), count, replace=False)
    return [f"{ADJECTIVES[n // len(NOUNS)]}-{NOUNS[n % len(NOUNS)]}" for n in numbers]
