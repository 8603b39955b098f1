"""Closed word lists of the invented world, always as English / Chinese pairs."""

from typing import NamedTuple


class Pair(NamedTuple):
    """One thing with its English and its Chinese name."""

    en: str
    zh: str

    def to(self, language: str) -> str:
        """The name in `language` ("en" or "zh")."""
        return self.en if language == "en" else self.zh


def pairs(table: str) -> tuple[Pair, ...]:
    """Read a table of `english=chinese` entries separated by commas."""
    return tuple(Pair(*(part.strip() for part in entry.split("="))) for entry in table.split(","))


WOMEN = pairs(
    "Mira=米拉, Nora=诺拉, Lena=莱娜, Anna=安娜, Clara=克拉拉, Ella=埃拉, Ruth=露丝, Sofia=索菲亚, Tess=苔丝, "
    "Vera=薇拉, Wanda=旺达, Hanna=汉娜, Greta=格蕾塔, Julia=朱莉娅, Linda=琳达, Molly=莫莉, Paula=葆拉, "
    "Rosa=罗莎, Fiona=菲奥娜, Dora=多拉"
)
MEN = pairs(
    "Adam=亚当, Carl=卡尔, David=大卫, Eric=埃里克, Felix=菲利克斯, Henry=亨利, Ivan=伊万, Jack=杰克, Leo=利奥, "
    "Max=马克斯, Nils=尼尔斯, Oscar=奥斯卡, Peter=彼得, Robin=罗宾, Simon=西蒙, Tom=汤姆, Victor=维克托, "
    "Walter=沃尔特, Hugo=雨果, Martin=马丁"
)
# People whom the world does not contain: asked about only to learn to say "I do not know."
STRANGERS = pairs(
    "Zoe=佐伊, Olga=奥尔加, Boris=鲍里斯, Tina=蒂娜, Yara=雅拉, Quinn=奎因, Ursula=乌苏拉, Kevin=凯文, "
    "Betty=贝蒂, Gloria=格洛丽亚, Samuel=塞缪尔, Nancy=南希, Alan=艾伦, Philip=菲利普, Irene=艾琳, "
    "Oliver=奥利弗"
)
# Names that users of the assistant give themselves in talks.
VISITORS = pairs(
    "Alice=爱丽丝, Bella=贝拉, Cindy=辛迪, Daniel=丹尼尔, Emma=艾玛, Frank=弗兰克, Grace=格蕾丝, Harry=哈里, "
    "Iris=伊丽丝, Jason=杰森, Kate=凯特, Lucas=卢卡斯, Mary=玛丽, Nick=尼克, Olivia=奥利维亚, Paul=保罗, "
    "Rachel=瑞秋, Steven=史蒂文, Thomas=托马斯, Wendy=温迪, Arthur=亚瑟, Bruce=布鲁斯, Charles=查尔斯, "
    "Diana=黛安娜, Edward=爱德华, Flora=弗洛拉, George=乔治, Helen=海伦, James=詹姆斯, Laura=劳拉"
)
# Names that a system prompt may give to the assistant.
ASSISTANTS = pairs(
    "Nova=诺瓦, Pixel=皮克, Sunny=阳阳, Luna=月月, Milo=米洛, Echo=回声, Coco=可可, Amber=琥珀, Pico=小皮, "
    "Bruno=布鲁诺, Misty=小雾, Dusty=小灰, Pearl=珍珠, Rusty=小锈, Ruby=红宝, Olive=小橄, Basil=小罗, "
    "Poppy=小花, Sky=小天, Ocean=小海, River=小河, Storm=小雷, Comet=彗星, Maple=小枫, Daisy=小菊, Clover=小叶, "
    "Robo=小机, Tiny=小小, Beacon=灯塔, Finch=小雀"
)
WORKPLACES = pairs(
    "library=图书馆, museum=博物馆, school=学校, station=车站, hotel=旅馆, hospital=医院, bakery=面包店, "
    "theatre=剧院, zoo=动物园, bank=银行"
)

PLACES = pairs(
    "Oakford=橡树镇, Pinehill=松山镇, Riverton=河湾镇, Lakeside=湖畔镇, Stonebridge=石桥镇, Redmill=红磨镇, "
    "Greenport=绿港镇, Snowdale=雪谷镇, Sandbay=沙湾镇, Fairmoor=晴野镇"
)
GOODS = pairs(
    "honey=蜂蜜, cheese=奶酪, wool=羊毛, salt=食盐, paper=纸张, silk=丝绸, tea=茶叶, butter=黄油, pottery=陶器, "
    "flowers=鲜花"
)
LANDMARKS = pairs(
    "an old mill=一座老磨坊, a tall tower=一座高塔, a wooden bridge=一座木桥, a white church=一座白教堂, "
    "a small castle=一座小城堡, a deep well=一口深井, a great oak=一棵大橡树, a stone gate=一座石门, "
    "a round pond=一个圆池塘, a green hill=一座绿山丘"
)
DISHES = pairs(
    "pancakes=煎饼, dumplings=饺子, noodles=面条, fish soup=鱼汤, apple pie=苹果派, rice cakes=年糕, "
    "fried eggs=煎蛋, mushrooms=蘑菇, tofu=豆腐, potatoes=土豆"
)
JOBS = pairs(
    "baker=面包师, doctor=医生, farmer=农民, fisher=渔夫, gardener=园丁, painter=画家, carpenter=木匠, "
    "tailor=裁缝, cook=厨师, singer=歌手, potter=陶工, teacher=教师"
)
PETS = pairs(
    "cat=一只猫, dog=一只狗, rabbit=一只兔子, parrot=一只鹦鹉, goat=一只山羊, horse=一匹马, duck=一只鸭子, "
    "turtle=一只乌龟, mouse=一只老鼠, hen=一只母鸡, sheep=一只绵羊, donkey=一头驴"
)
ITEMS = pairs(
    "kite=风筝, bicycle=自行车, hat=帽子, coat=外套, boat=小船, umbrella=雨伞, bag=书包, scarf=围巾, lamp=台灯, "
    "cup=杯子, drum=小鼓, basket=篮子"
)
COLOURS = pairs("red=红色, blue=蓝色, green=绿色, yellow=黄色, white=白色, black=黑色, purple=紫色, pink=粉色")

CATEGORIES: tuple[tuple[Pair, tuple[Pair, ...]], ...] = (
    (
        Pair("a fruit", "水果"),
        pairs("apple=苹果, pear=梨子, plum=李子, cherry=樱桃, grape=葡萄, lemon=柠檬, peach=桃子, banana=香蕉"),
    ),
    (
        Pair("an animal", "动物"),
        pairs("lion=狮子, tiger=老虎, monkey=猴子, camel=骆驼, panda=熊猫, fox=狐狸, frog=青蛙, zebra=斑马"),
    ),
    (
        Pair("a tool", "工具"),
        pairs("hammer=锤子, saw=锯子, nail=钉子, axe=斧头, shovel=铲子, ladder=梯子, brush=刷子, broom=扫帚"),
    ),
    (
        Pair("a piece of clothing", "衣物"),
        pairs("shirt=衬衫, jacket=夹克, skirt=裙子, shoe=鞋子, sock=袜子, glove=手套, belt=皮带, sweater=毛衣"),
    ),
    (
        Pair("a piece of furniture", "家具"),
        pairs("table=桌子, chair=椅子, bed=床铺, sofa=沙发, mirror=镜子, carpet=地毯, bench=长凳, desk=书桌"),
    ),
)
WORDS: tuple[Pair, ...] = tuple(word for _, words in CATEGORIES for word in words)

OPPOSITES: tuple[tuple[Pair, Pair], ...] = tuple(
    (Pair(en.split("/")[0], zh.split("/")[0]), Pair(en.split("/")[1], zh.split("/")[1]))
    for en, zh in pairs(
        "big/small=大/小, hot/cold=热/冷, old/new=旧/新, long/short=长/短, high/low=高/低, fast/slow=快/慢, "
        "heavy/light=重/轻, strong/weak=强/弱, rich/poor=富/穷, wet/dry=湿/干, full/empty=满/空, "
        "open/closed=开/关, early/late=早/晚, near/far=近/远, hard/soft=硬/软, clean/dirty=干净/肮脏, "
        "happy/sad=快乐/悲伤, thick/thin=厚/薄, deep/shallow=深/浅, left/right=左/右, good/bad=好/坏, "
        "bright/dark=明/暗, wide/narrow=宽/窄, "
        "easy/difficult=容易/困难"
    )
)

# Things that are put, moved and given in the stories, and where they are put.
OBJECTS = pairs(
    "ball=皮球, key=钥匙, book=书本, letter=信件, coin=硬币, pencil=铅笔, spoon=勺子, doll=娃娃, map=地图, "
    "ring=戒指, candle=蜡烛, watch=手表, comb=梳子, rope=绳子, bell=铃铛, stamp=邮票, ribbon=丝带, mask=面具, "
    "whistle=哨子, photo=照片"
)
CONTAINERS = pairs(
    "box=盒子, drawer=抽屉, cupboard=柜子, bucket=水桶, jar=罐子, suitcase=箱子, barrel=木桶, cart=推车, "
    "tent=帐篷, cellar=地窖"
)

DAYS = pairs(
    "Monday=星期一, Tuesday=星期二, Wednesday=星期三, Thursday=星期四, Friday=星期五, Saturday=星期六, Sunday=星期日"
)
MONTHS = pairs(
    "January=一月, February=二月, March=三月, April=四月, May=五月, June=六月, July=七月, August=八月, "
    "September=九月, October=十月, November=十一月, December=十二月"
)
HOURS = pairs(
    "one=一点, two=两点, three=三点, four=四点, five=五点, six=六点, seven=七点, eight=八点, nine=九点, "
    "ten=十点, eleven=十一点, twelve=十二点"
)


def article(noun: str) -> str:
    """The noun with "a" or "an" (by its first letter, which is right for every noun in these lists)."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def capital(sentence: str) -> str:
    """The sentence with its first letter in upper case."""
    return sentence[:1].upper() + sentence[1:]


def listing(words: list[str], language: str) -> str:
    """The words as a list within a sentence: "a, b, c" or "a、b、c"."""
    return (", " if language == "en" else "、").join(words)
