//! Stop strings on streamed text.

use crate::Error;

/// Ends a stream of text at the first stop string.
///
/// The match that *completes* first wins, as if the text had arrived one character at a time; of several that
/// complete at the same place the longest does, so that no part of a stop string is ever shown. What is returned
/// over all calls is the text before that match, or the whole text if there is none. Text that may still turn out
/// to be the beginning of a stop string is held back: at most the longest stop string less one byte.
///
/// The matcher is an Aho-Corasick automaton: each byte of text is looked at once, whatever the number of stop
/// strings.
#[derive(Debug, Clone)]
pub struct StopStrings {
    nodes: Vec<Node>,
    state: u32,
    buf: String,
    /// Everything in `buf` before this has been returned, or belongs to the match.
    start: usize,
    matched: Option<u32>,
    work: u64,
}

/// One state: a prefix of some stop string.
#[derive(Debug, Clone, Default)]
struct Node {
    /// Sorted by byte.
    next: Vec<(u8, u32)>,
    /// The state of the longest proper suffix that is also a prefix of a stop string.
    fail: u32,
    depth: u32,
    /// The longest stop string that ends here: its place in the list, and its length.
    hit: Option<(u32, u32)>,
}

impl Node {
    fn child(&self, byte: u8) -> Option<u32> {
        self.next.binary_search_by_key(&byte, |&(b, _)| b).ok().map(|i| self.next[i].1)
    }
}

impl StopStrings {
    /// A matcher for these strings; an empty list never matches, an empty string is an error.
    pub fn new<S: AsRef<str>>(stops: &[S]) -> Result<Self, Error> {
        let mut nodes = vec![Node::default()];
        for (index, stop) in stops.iter().enumerate() {
            let stop = stop.as_ref().as_bytes();
            if stop.is_empty() {
                return Err(Error::EmptyStop { index });
            }
            let end = insert(&mut nodes, stop);
            nodes[end].hit.get_or_insert((index as u32, stop.len() as u32));
        }
        link(&mut nodes);
        Ok(Self { nodes, state: 0, buf: String::new(), start: 0, matched: None, work: 0 })
    }

    /// Adds text and returns what may now be shown. After a match everything further is swallowed.
    pub fn push(&mut self, text: &str) -> &str {
        if self.matched.is_some() {
            return "";
        }
        self.compact();
        let base = self.buf.len();
        self.buf.push_str(text);
        let from = self.start;
        for (i, byte) in text.bytes().enumerate() {
            self.step(byte);
            if let Some((index, len)) = self.nodes[self.state as usize].hit {
                self.matched = Some(index);
                self.start = base + i + 1;
                return &self.buf[from..self.start - len as usize];
            }
        }
        self.start = self.buf.len() - self.nodes[self.state as usize].depth as usize;
        &self.buf[from..self.start]
    }

    /// Ends the stream and returns the text that was held back; nothing after a match.
    pub fn finish(&mut self) -> &str {
        if self.matched.is_some() {
            return "";
        }
        let from = std::mem::replace(&mut self.start, self.buf.len());
        self.state = 0;
        &self.buf[from..]
    }

    /// Which stop string ended the stream: its place in the list given to [`new`](Self::new).
    pub fn matched(&self) -> Option<usize> {
        self.matched.map(|i| i as usize)
    }

    /// The text after the match that arrived in the same push as its end. Empty without a match.
    pub fn after_match(&self) -> &str {
        if self.matched.is_some() { &self.buf[self.start..] } else { "" }
    }

    /// The last `len` bytes that a push returned, borrowed again without `&mut`.
    pub(crate) fn last(&self, len: usize) -> &str {
        let end = self.start - self.hit_len();
        &self.buf[end - len..end]
    }

    fn hit_len(&self) -> usize {
        let hit = self.nodes[self.state as usize].hit;
        if self.matched.is_some() { hit.map_or(0, |(_, len)| len as usize) } else { 0 }
    }

    /// Bytes held back at the moment.
    pub fn held(&self) -> usize {
        if self.matched.is_some() { 0 } else { self.buf.len() - self.start }
    }

    /// Automaton steps taken plus bytes moved: the measure of work, at most four a byte of text.
    pub fn work(&self) -> u64 {
        self.work
    }

    fn step(&mut self, byte: u8) {
        loop {
            self.work += 1;
            let node = &self.nodes[self.state as usize];
            match node.child(byte) {
                Some(next) => {
                    self.state = next;
                    return;
                }
                None if self.state == 0 => return,
                None => self.state = node.fail,
            }
        }
    }

    /// Drops returned text once it is at least half the buffer, so that moving the rest is paid for.
    fn compact(&mut self) {
        if self.start * 2 >= self.buf.len() {
            self.work += (self.buf.len() - self.start) as u64;
            self.buf.drain(..self.start);
            self.start = 0;
        }
    }
}

/// Adds a path; returns its last state.
fn insert(nodes: &mut Vec<Node>, stop: &[u8]) -> usize {
    let mut at = 0;
    for &byte in stop {
        at = match nodes[at].next.binary_search_by_key(&byte, |&(b, _)| b) {
            Ok(i) => nodes[at].next[i].1 as usize,
            Err(i) => {
                let new = nodes.len();
                nodes.push(Node { depth: nodes[at].depth + 1, ..Node::default() });
                nodes[at].next.insert(i, (byte, new as u32));
                new
            }
        };
    }
    at
}

/// Fills the fail links and hits, breadth first.
fn link(nodes: &mut [Node]) {
    let mut queue = std::collections::VecDeque::from([0u32]);
    while let Some(at) = queue.pop_front() {
        for (byte, child) in nodes[at as usize].next.clone() {
            if at != 0 {
                let mut fail = nodes[at as usize].fail;
                let target = loop {
                    match nodes[fail as usize].child(byte) {
                        Some(next) => break next,
                        None if fail == 0 => break 0,
                        None => fail = nodes[fail as usize].fail,
                    }
                };
                nodes[child as usize].fail = target;
                let inherited = nodes[target as usize].hit;
                let node = &mut nodes[child as usize];
                node.hit = node.hit.or(inherited);
            }
            queue.push_back(child);
        }
    }
}
