// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A node of a cluster, and its pools as devices of one driver.

use thiserror::Error;

use crate::plugin::Pool;

/// The name of the driver: the vendor of the CDI devices and of the resources.
pub(crate) const DRIVER: &str = "virtio-ism";
/// The longest name of a node, with room for the rest of the slice's name.
const NAME_MAX: usize = 240;
/// The largest number of devices in a slice.
const POOLS_MAX: usize = 128;

/// No node of a cluster.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum NoNode {
    /// The name is none of a node.
    #[error("{0:?} is no node: up to {NAME_MAX} small letters, digits, - and dots")]
    Name(String),
    /// The name of a pool is none of a device.
    #[error(
        "the pool {0:?} cannot be a device: its name has other characters than small letters, digits and -"
    )]
    Pool(String),
    /// Two pools have one name.
    #[error("there are two pools {0:?}")]
    Twice(String),
    /// Too many pools.
    #[error("{0} pools are more than the {POOLS_MAX} of a slice")]
    Many(usize),
}

/// A node of a cluster.
#[derive(Debug)]
pub struct Node {
    name: String,
    pools: Vec<Pool>,
}

/// Whether a text is a part of a path in the API server, and names one object.
pub(crate) fn is_name(text: &str) -> bool {
    let is_end = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit();
    text.len() <= 253
        && text.starts_with(is_end)
        && text.ends_with(is_end)
        && text.chars().all(|c| is_end(c) || c == '-' || c == '.')
}

impl Node {
    /// A node with its pools.
    ///
    /// # Errors
    ///
    /// Names that the API server does not take, and too many pools.
    pub fn new(name: &str, pools: Vec<Pool>) -> Result<Node, NoNode> {
        if !is_name(name) || name.len() > NAME_MAX {
            return Err(NoNode::Name(name.to_owned()));
        }
        if pools.len() > POOLS_MAX {
            return Err(NoNode::Many(pools.len()));
        }
        for (i, pool) in pools.iter().enumerate() {
            if !is_name(pool.name()) {
                return Err(NoNode::Pool(pool.name().to_owned()));
            }
            if pools[..i].iter().any(|other| other.name() == pool.name()) {
                return Err(NoNode::Twice(pool.name().to_owned()));
            }
        }
        Ok(Node { name: name.to_owned(), pools })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn pools(&self) -> &[Pool] {
        &self.pools
    }

    /// The pool with a name.
    pub(crate) fn pool(&self, name: &str) -> Option<&Pool> {
        self.pools.iter().find(|pool| pool.name() == name)
    }

    /// The name of the node's slice.
    pub(crate) fn slice(&self) -> String {
        format!("{}-{DRIVER}", self.name)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_objects() {
        let pools = |names: &[&str]| names.iter().map(|name| name.parse().unwrap()).collect();
        assert_eq!(
            Node::new("node-1.lan", pools(&["any", "red"])).unwrap().slice(),
            "node-1.lan-virtio-ism"
        );
        for wrong in ["", "Node", "a/b", "a?b", "-a", "..", &"x".repeat(NAME_MAX + 1)] {
            assert_eq!(Node::new(wrong, vec![]).unwrap_err(), NoNode::Name(wrong.into()));
        }
        for wrong in ["Red", "a_b"] {
            assert_eq!(Node::new("n", pools(&[wrong])).unwrap_err(), NoNode::Pool(wrong.into()));
        }
        assert_eq!(Node::new("n", pools(&["a", "a"])).unwrap_err(), NoNode::Twice("a".into()));
        let many = vec!["a"; POOLS_MAX + 1];
        assert_eq!(Node::new("n", pools(&many)).unwrap_err(), NoNode::Many(POOLS_MAX + 1));
    }
}
