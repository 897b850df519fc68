//! Metrics by labels, of which those of one model can be forgotten.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use prometheus_client::encoding::{EncodeLabelSet, EncodeMetric, MetricEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::{MetricType, TypedMetric};

/// Labels, one of which is a model.
pub trait ModelLabel {
    /// The model.
    fn model(&self) -> &str;
}

/// Series of any labels.
pub trait Forget: Send + Sync {
    /// Adds the models that have series.
    fn models(&self, to: &mut BTreeSet<String>);

    /// Forgets those of a model.
    fn forget(&self, model: &str);
}

/// Clones share the metrics.
#[derive(Debug)]
pub struct Series<L, M> {
    all: Arc<RwLock<BTreeMap<L, M>>>,
    make: fn() -> M,
}

impl<L, M> Clone for Series<L, M> {
    fn clone(&self) -> Self {
        Self { all: Arc::clone(&self.all), make: self.make }
    }
}

impl<L> Default for Series<L, Counter> {
    fn default() -> Self {
        Self::new(Counter::default)
    }
}

impl<L, M> Series<L, M> {
    /// Without series. `make` makes a metric.
    #[must_use]
    pub fn new(make: fn() -> M) -> Self {
        Self { all: Arc::default(), make }
    }
}

impl<L: Ord, M: Clone> Series<L, M> {
    /// The metric with these labels, made if it is not there.
    pub fn of(&self, labels: L) -> M {
        if let Some(metric) = self.all.read().unwrap_or_else(PoisonError::into_inner).get(&labels) {
            return metric.clone();
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        all.entry(labels).or_insert_with(self.make).clone()
    }
}

impl<L, M> Forget for Series<L, M>
where
    L: ModelLabel + Ord + Send + Sync,
    M: Send + Sync,
{
    fn models(&self, to: &mut BTreeSet<String>) {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        to.extend(all.keys().map(|labels| labels.model().to_owned()));
    }

    fn forget(&self, model: &str) {
        self.all.write().unwrap_or_else(PoisonError::into_inner).retain(|labels, _| labels.model() != model);
    }
}

impl<L, M: TypedMetric> TypedMetric for Series<L, M> {
    const TYPE: MetricType = M::TYPE;
}

impl<L: EncodeLabelSet, M: EncodeMetric + TypedMetric> EncodeMetric for Series<L, M> {
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.iter().try_for_each(|(labels, metric)| metric.encode(encoder.encode_family(labels)?))
    }

    fn metric_type(&self) -> MetricType {
        M::TYPE
    }

    fn is_empty(&self) -> bool {
        self.all.read().unwrap_or_else(PoisonError::into_inner).is_empty()
    }
}
