"""Models as points: merging methods, distances, the losses between models, and the order of their neurons."""

from tdfunc.core.surface import surface as _surface
from tdfunc.weights.averages.karcher import karcher as karcher
from tdfunc.weights.averages.linear import linear as linear
from tdfunc.weights.averages.model_stock import model_stock as model_stock
from tdfunc.weights.averages.multislerp import multislerp as multislerp
from tdfunc.weights.averages.nuslerp import nuslerp as nuslerp
from tdfunc.weights.averages.slerp import slerp as slerp
from tdfunc.weights.method import Method as Method
from tdfunc.weights.method import PerModel as PerModel
from tdfunc.weights.method import method as method
from tdfunc.weights.methods import METHODS as METHODS
from tdfunc.weights.methods import table as table
from tdfunc.weights.space.barriers import barrier as barrier
from tdfunc.weights.space.barriers import barriers as barriers
from tdfunc.weights.space.barriers import line_losses as line_losses
from tdfunc.weights.space.distances import cosine as cosine
from tdfunc.weights.space.distances import distance as distance
from tdfunc.weights.space.matching import channel_groups as channel_groups
from tdfunc.weights.space.matching import permute_channels as permute_channels
from tdfunc.weights.space.matching import weight_matching as weight_matching
from tdfunc.weights.swaps.arcee_fusion import arcee_fusion as arcee_fusion
from tdfunc.weights.swaps.nearswap import nearswap as nearswap
from tdfunc.weights.swaps.passthrough import passthrough as passthrough
from tdfunc.weights.swaps.stack_layers import stack_layers as stack_layers
from tdfunc.weights.tasks.breadcrumbs import breadcrumbs as breadcrumbs
from tdfunc.weights.tasks.breadcrumbs import breadcrumbs_ties as breadcrumbs_ties
from tdfunc.weights.tasks.dare import dare_linear as dare_linear
from tdfunc.weights.tasks.dare import dare_ties as dare_ties
from tdfunc.weights.tasks.della import della as della
from tdfunc.weights.tasks.della import della_linear as della_linear
from tdfunc.weights.tasks.ram import ram as ram
from tdfunc.weights.tasks.ram import ramplus_tl as ramplus_tl
from tdfunc.weights.tasks.sce import sce as sce
from tdfunc.weights.tasks.task_arithmetic import task_arithmetic as task_arithmetic
from tdfunc.weights.tasks.ties import ties as ties

_surface(globals())
