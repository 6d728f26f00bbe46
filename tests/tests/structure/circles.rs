//! Circles in graphs of files, folders and rooms.

use std::collections::{BTreeMap, BTreeSet};

/// The groups of nodes that reach each other: the strongly connected components with more than
/// one node, each sorted (Tarjan).
pub(crate) fn circles<N: Ord + Clone>(edges: &BTreeSet<(N, N)>) -> Vec<Vec<N>> {
    let nodes: BTreeSet<&N> = edges.iter().flat_map(|(from, to)| [from, to]).collect();
    let numbers: BTreeMap<&N, usize> =
        nodes.iter().enumerate().map(|(i, node)| (*node, i)).collect();
    let nodes: Vec<&N> = nodes.into_iter().collect();
    let mut next = vec![Vec::new(); nodes.len()];
    for (from, to) in edges {
        next[numbers[from]].push(numbers[to]);
    }
    let mut search = Search {
        next,
        index: vec![None; nodes.len()],
        low: vec![0; nodes.len()],
        on_stack: vec![false; nodes.len()],
        stack: Vec::new(),
        count: 0,
        found: Vec::new(),
    };
    for node in 0..nodes.len() {
        if search.index[node].is_none() {
            search.visit(node);
        }
    }
    let mut found: Vec<Vec<N>> = search
        .found
        .into_iter()
        .map(|group| {
            let mut group: Vec<N> = group.into_iter().map(|node| nodes[node].clone()).collect();
            group.sort();
            group
        })
        .collect();
    found.sort();
    found
}

struct Search {
    next: Vec<Vec<usize>>,
    index: Vec<Option<usize>>,
    low: Vec<usize>,
    on_stack: Vec<bool>,
    stack: Vec<usize>,
    count: usize,
    found: Vec<Vec<usize>>,
}

impl Search {
    fn visit(&mut self, node: usize) {
        let index = self.count;
        self.count += 1;
        self.index[node] = Some(index);
        self.low[node] = index;
        self.stack.push(node);
        self.on_stack[node] = true;
        for i in 0..self.next[node].len() {
            let to = self.next[node][i];
            match self.index[to] {
                None => {
                    self.visit(to);
                    self.low[node] = self.low[node].min(self.low[to]);
                }
                Some(index) if self.on_stack[to] => self.low[node] = self.low[node].min(index),
                Some(_) => {}
            }
        }
        if self.low[node] == index {
            let mut group = Vec::new();
            while let Some(one) = self.stack.pop() {
                self.on_stack[one] = false;
                group.push(one);
                if one == node {
                    break;
                }
            }
            if group.len() > 1 {
                self.found.push(group);
            }
        }
    }
}

/// For two files, the two entries of the deepest folder that holds both which the files are in:
/// a folder with all that is below it, or the file itself.
pub(crate) fn neighbours(from: &str, to: &str) -> (String, String) {
    let from: Vec<&str> = from.split('/').collect();
    let to: Vec<&str> = to.split('/').collect();
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    (from[..=common].join("/"), to[..=common].join("/"))
}
